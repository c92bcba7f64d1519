"""`dagrl launch` on two and three hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

pytestmark = pytest.mark.multinode

LAUNCH = Path(__file__).parents[2] / "launch"
TOKEN = "a-secret-of-the-user-0123456789"


@pytest.fixture
def pipeline(lab):
    """The tiny pipeline with trainer and generator on a slot of each of two machines."""
    tiny = lab.tiny_pipeline()
    tiny["groups"] = {"both": {"nodes": 2, "cpus_per_node": 1}}
    for engine in ("actor", "generator"):
        tiny["engines"][engine]["group"] = "both"
    tiny["run"] = {"steps": 3, "seed": 3, "start_timeout_s": 500}
    return tiny


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_run_across_several_hosts(make_job, pipeline, hosts):
    pipeline["groups"]["both"]["nodes"] = pipeline["run"]["host_workers"] = hosts
    job = make_job(hosts, pipeline)
    job.start_all()
    assert job.codes() == [0] * hosts, job.everything()
    steps = [json.loads(line)["step"] for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    workers = json.loads((job.run_dir / "workers.json").read_text())
    assert {name: worker["host"] for name, worker in workers.items()} == {
        f"{executor}/{rank}": f"node{rank}" for executor in ("host", "actor", "generator") for rank in range(hosts)
    }
    assert [host.left_behind() for host in job.hosts] == [[]] * hosts


def test_parts_across_two_hosts(make_job, pipeline):
    pipeline["schedule"] = {"max_staleness": 3}
    job = make_job(2, pipeline)
    for part in ("rollout,reward", "advantage,update"):
        job.start_all("--only", part)
        assert job.codes() == [0, 0], job.everything()
    metrics = (job.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2, 3]
    workers = {
        folder.name: set(json.loads((folder / "workers.json").read_text()))
        for folder in (job.run_dir, job.run_dir.with_name("run-explorer-1of1"))
    }
    assert {"actor/0", "actor/1"} < workers["run"] and "generator/0" not in workers["run"]
    assert {"generator/0", "generator/1"} < workers["run-explorer-1of1"]


def test_a_host_that_is_missing_is_named_to_all_within_the_bound(make_job, pipeline):
    job = make_job(3, pipeline)
    for rank in (0, 2):
        job.start(rank, "run.start_timeout_s=12")
    assert job.codes() == [1, 1], job.everything()
    for rank in (0, 2):
        said = job.output(rank)
        assert "waited 12 s for rank 1 of 3 machines to connect to" in said
        assert f"connected: rank 0 (node0), rank 2 (node2, {job.hosts[2].address})" in said
        assert "Traceback" not in said
    assert "waiting for rank 1 of 3 machines" in job.output(0)
    assert [host.left_behind() for host in job.hosts] == [[], [], []]


def test_without_rank_0_the_others_say_where_they_looked_for_it(make_job, pipeline):
    job = make_job(2, pipeline)
    job.start(1, "run.start_timeout_s=3")
    assert job.codes() == [1]
    assert f"waited 3 s for rank 0 at {job.hosts[0].address}:29511: connection refused" in job.output(1)
    assert "Traceback" not in job.output(1)


def test_groups_that_do_not_fit_are_reported_by_machine_before_anything_starts(make_job, pipeline):
    job = make_job(2, pipeline)
    job.start_all("groups.both.cpus_per_node=2")
    assert job.codes() == [1, 1], job.everything()
    sentence = (
        "the group asks for both 2 CPU slots on each of 2 machines; there are node0 with 1 CPU slot, "
        f"node1, {job.hosts[1].address} with 1 CPU slot; change the groups, PET_NNODES or PET_NPROC_PER_NODE"
    )
    assert all(sentence in job.output(rank) for rank in (0, 1)), job.everything()
    assert "Ray is up" not in job.output(0)


def test_a_host_that_is_cut_off_in_mid_run_ends_it_on_both_sides(make_job, pipeline):
    pipeline["run"] |= {"steps": 100000, "max_restarts": 0}
    job = make_job(2, pipeline)
    for rank in (0, 1):
        job.start(rank, RAY_AUTH_TOKEN=TOKEN)
    job.wait_for(0, "step 2/")
    job.hosts[1].cut_off()
    assert job.codes() == [1, 1], job.everything()
    lost, told = job.output(1), job.output(0)
    assert f"lost rank 0 at {job.hosts[0].address}:29511: no heartbeat for 20 s" in lost
    assert f"lost rank 1 (node1, {job.hosts[1].address}): no heartbeat for 20 s" in told
    assert "dagrl run: failed" in told
    assert "Traceback" not in lost + told
    assert TOKEN not in lost + told + "".join(log.read_text() for log in (job.run_dir / "logs").iterdir())
    assert [host.left_behind() for host in job.hosts] == [[], []]


def test_a_host_that_comes_back_continues_from_the_last_checkpoint(make_job, pipeline):
    pipeline["run"] |= {"steps": 40, "save_every": 1}
    job = make_job(2, pipeline)
    job.start_all()
    job.wait_for(0, "step 2/")
    job.hosts[1].cut_off()
    job.wait_for(0, "lost rank 1")
    assert job.code(1) == 1
    job.hosts[1].plug_in()
    job.start(1)
    assert job.codes() == [0, 0], job.everything()
    assert "all of the run goes on from its last checkpoint (restart" in job.output(0)
    steps = [json.loads(line)["step"] for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 41))
    assert [host.left_behind() for host in job.hosts] == [[], []]


def test_a_group_with_min_nodes_loses_and_gains_hosts(make_job, pipeline):
    pipeline["groups"] = {"train": {"cpus_per_node": 1}, "rollout": {"nodes": 2, "min_nodes": 1, "cpus_per_node": 1}}
    pipeline["engines"]["actor"]["group"] = "train"
    pipeline["engines"]["generator"]["group"] = "rollout"
    pipeline["run"] |= {"steps": 100000, "host_workers": 2}
    job = make_job(3, pipeline)
    for rank in (0, 1):
        job.start(rank, PET_NNODES="2:3")
    job.wait_for(0, "step 2/")
    job.start(2, PET_NNODES="2:3")
    job.wait_for(0, "generator/1 joined: generator has 2 of 2 ranks")
    job.hosts[1].cut_off()
    job.wait_for(0, "generator/0 is lost: ")
    job.hosts[1].plug_in()
    assert job.code(1) == 1, job.everything()
    job.start(1, PET_NNODES="2:3")
    job.wait_for(0, "generator/0 joined: generator has 2 of 2 ranks")
    job.wait_for(0, "step ")
    job.processes[2].terminate()
    assert job.code(2) == 0 and "this machine leaves the run, which goes on without it" in job.output(2)
    job.wait_for(0, "generator/1 is lost: ")
    for rank in (0, 1):
        job.processes[rank].terminate()
    assert job.codes() == [0, 0, 0], job.everything()
    lines = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)]
    missing = [int(line["run/missing_ranks"]) for line in lines]
    assert [number for number, _ in groupby(missing)] == [1, 0, 1, 0, 1]
    assert {line["run/restarts"] for line in lines} == {0}
    assert [host.left_behind() for host in job.hosts] == [[], [], []]


def test_a_signal_on_any_host_stops_all_with_a_checkpoint(make_job, pipeline):
    pipeline["run"]["steps"] = 100000
    job = make_job(2, pipeline)
    job.start_all()
    job.wait_for(0, "step 1/")
    # As a batch system does that cancels a job: everywhere at once. It counts as one wish.
    for process in job.processes.values():
        process.terminate()
    assert job.codes() == [0, 0], job.everything()
    assert "`dagrl run` with the same folder goes on" in job.output(0)
    assert list((job.run_dir / "checkpoints").iterdir())
    assert [host.left_behind() for host in job.hosts] == [[], []]


def test_a_launcher_that_is_killed_takes_everything_with_it(make_job, pipeline):
    pipeline["run"]["steps"] = 100000
    job = make_job(2, pipeline)
    job.start_all()
    job.wait_for(0, "step 1/")
    job.processes[0].kill()
    assert job.code(1) == 1, job.everything()
    assert f"lost rank 0 at {job.hosts[0].address}:29511: it closed the connection" in job.output(1)
    assert [host.left_behind() for host in job.hosts] == [[], []]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"PET_NODE_RANK": "0"}, "is `10."),
        ({"PET_NNODES": "3"}, "PET_NNODES is 3 on node1 (10."),
        ({"PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE is `many`; set it to a whole number of 1 or more"),
    ],
)
def test_a_wrong_variable_is_one_sentence(make_job, pipeline, changed, sentence):
    job = make_job(2, pipeline)
    job.start(0, "run.start_timeout_s=15")
    job.start(1, "run.start_timeout_s=15", **changed)
    codes = job.codes()
    assert all(codes), job.everything()
    assert sentence in job.output(1)
    assert "Traceback" not in job.everything()


def test_the_script_for_ssh_starts_all_hosts(make_job, pipeline, tmp_path):
    pipeline["run"] |= {"steps": 1}
    job = make_job(2, pipeline)
    programs = tmp_path / "bin"
    programs.mkdir()
    # In place of a connection: into the namespace of that name.
    into = "".join(f"{host.name}) namespace={host.namespace}; export TMPDIR={host.temporary};;\n" for host in job.hosts)
    ssh = (
        'while [ "$1" = -o ]; do shift 2; done\n'
        f'case "$1" in\n{into}esac\n'
        'exec ip netns exec "$namespace" unshare --uts sh -c \'hostname "$0" && exec sh -c "$1"\' "$1" "$2"\n'
    )
    for name, text in {"ssh": ssh, "dagrl": f'exec {sys.executable} -m dagrl "$@"\n'}.items():
        (programs / name).write_text("#!/bin/sh\n" + text)
        (programs / name).chmod(0o755)
    (tmp_path / "hosts").write_text("node0\nnode1\n")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PET_"))}
    done = subprocess.run(
        [LAUNCH / "ssh.sh", tmp_path / "hosts", "pipeline.yaml", "--run-dir", "run"],
        cwd=tmp_path,
        env=variables | {"PATH": f"{programs}:{variables['PATH']}", "PET_MASTER_ADDR": job.hosts[0].address},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished step 1" in done.stdout
    assert [host.left_behind() for host in job.hosts] == [[], []]
