"""`dagrl launch` on two and three hosts."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.multinode


@pytest.fixture
def pipeline(lab):
    """The tiny pipeline with trainer and generator on a slot of each of two machines."""
    tiny = lab.tiny_pipeline()
    tiny["groups"] = {"both": {"nodes": 2, "cpus_per_node": 1}}
    for engine in ("actor", "generator"):
        tiny["engines"][engine]["group"] = "both"
    tiny["run"] = {"steps": 3, "seed": 3, "host_workers": 2, "start_timeout_s": 200}
    return tiny


def test_a_run_across_two_hosts(make_job, pipeline):
    job = make_job(2, pipeline)
    job.start_all()
    assert job.codes() == [0, 0], job.everything()
    steps = [json.loads(line)["step"] for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    workers = json.loads((job.run_dir / "workers.json").read_text())
    hosts = {name: worker["host"] for name, worker in workers.items()}
    assert hosts == {
        **{f"{executor}/{rank}": f"node{rank}" for executor in ("host", "actor", "generator") for rank in (0, 1)}
    }
    assert [host.left_behind() for host in job.hosts] == [[], []]
