"""A real run whose generator is a SGLang server on the CPU, until somebody kills the worker that holds it."""

from __future__ import annotations

import json
import os
import signal

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory):
    """A run under way that has trained for two steps: a mixture, whose tokens the trainer routes as SGLang did."""
    folder = tmp_path_factory.mktemp("sglang")
    pipeline = lab.tiny_pipeline()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    pipeline["model"]["init"] |= {"model_type": "qwen3_moe", **experts}
    pipeline["engines"]["actor"]["router_replay"] = True
    pipeline["engines"]["generator"] = {
        "backend": "sglang",
        "group": "rollout",
        "follows": "actor",
        "server": {"log_level": "info"},
        "weight_sync": {"route": "broadcast", "checksum": True, "bucket_mib": 1},
    }
    pipeline["run"] |= {"steps": 100_000, "save_every": 100_000, "validate_every": 2}
    run = lab.start(lab.write_pipeline(folder, pipeline), folder / "run")
    run.wait_for_step(3)
    return run


def test_it_trains_on_what_the_server_samples(run):
    steps = [line for line in run.metrics() if line["step"] > 0][:3]
    assert [line["policy_version"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["staleness/max"] == 0
        assert 1 <= line["response_tokens/mean"] <= 3
        assert line["mismatch/logprob_diff/max"] <= 1e-5, "the server samples with the trainer's newest weights"
    assert "val/reward/mean" in steps[1]


def test_what_its_processes_print_is_kept(run):
    assert "max_total_num_tokens" in (run.folder / "logs" / "generator-0-tp0.log").read_text()


def test_a_worker_that_is_killed_takes_its_server_along(run):
    """The last test: nobody brings the run back."""
    worker = json.loads((run.folder / "workers.json").read_text())["generator/0"]
    os.kill(worker["pid"], signal.SIGKILL)
    assert run.wait() == 1
    assert "worker  generator/0" in run.output and "the worker's process died" in run.output
    assert run.left_behind() == []
