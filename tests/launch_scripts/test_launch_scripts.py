"""The wrappers in launch/: with stand-ins for the programs that only clusters have."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

LAUNCH = Path(__file__).parents[2] / "launch"

# Stands in for dagrl: says how it was called, and waits for as long as a pipeline of that name says.
DAGRL = """#!/usr/bin/env bash
trap 'echo "$PET_NODE_RANK" >> "$SEEN/stopped"; exit 0' TERM
env | grep -E '^(PET_|RAY_AUTH_TOKEN)' > "$SEEN/rank$PET_NODE_RANK.env"
printf '%s\\n' "$PWD" "$@" > "$SEEN/rank$PET_NODE_RANK.args"
if [[ $2 == wait.yaml ]]; then for _ in {1..100}; do sleep 0.1; done; fi
exit $((PET_NODE_RANK == 0 ? 3 : 0))
"""
SSH = """#!/usr/bin/env bash
while [[ $1 == -o ]]; do shift 2; done
echo "$*" >> "$SEEN/ssh"
shift
cd / && exec sh -c "$*"
"""
SRUN = """#!/usr/bin/env bash
echo "$*" > "$SEEN/srun"
while [[ $1 == --* ]]; do shift; done
for task in 0 1 2; do SLURM_PROCID=$task "$@" & tasks+=($!); done
wait "${tasks[0]}"; code=$?; wait; exit "$code"
"""
SCONTROL = '#!/bin/sh\n[ "$1 $2 $3" = "show hostnames gpu[1-3]" ] && printf "gpu1\\ngpu2\\ngpu3\\n"\n'


@pytest.fixture
def cluster(tmp_path: Path):
    """A folder with the stand-ins on PATH; what they have seen is in ``seen``."""
    programs, seen = tmp_path / "bin", tmp_path / "seen"
    programs.mkdir()
    seen.mkdir()
    for name, text in {"dagrl": DAGRL, "ssh": SSH, "srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "work dir").mkdir()
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "SEEN": str(seen), "HOME": str(tmp_path)}

    def start(script: str, *arguments: str, **further: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", LAUNCH / script, *arguments],
            cwd=tmp_path / "work dir",
            env=variables | further,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start, seen


def seen_by(seen: Path, rank: int) -> tuple[dict[str, str], list[str]]:
    variables = dict(line.split("=", 1) for line in (seen / f"rank{rank}.env").read_text().splitlines())
    return variables, (seen / f"rank{rank}.args").read_text().splitlines()


def wait_until(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.stdout and process.stdout.read()
        time.sleep(0.02)


def test_slurm_starts_a_task_on_each_machine(cluster):
    start, seen = cluster
    job = {
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "gpu[1-3]",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_GPUS_ON_NODE": "8",
    }
    process = start("slurm.sh", "p.yaml", "run.steps=7", "--run-dir", "a b", **job)
    assert process.wait(30) == 3, "the code of rank 0"
    tokens = set()
    for rank in range(3):
        variables, arguments = seen_by(seen, rank)
        tokens.add(variables.pop("RAY_AUTH_TOKEN"))
        assert variables == {
            "PET_NNODES": "3",
            "PET_NODE_RANK": str(rank),
            "PET_NPROC_PER_NODE": "8",
            "PET_MASTER_ADDR": "gpu1",
            "PET_MASTER_PORT": "23456",
        }
        assert arguments[1:] == ["launch", "p.yaml", "run.steps=7", "--run-dir", "a b"]
    (token,) = tokens
    assert len(token) == 64 and token not in (seen / "srun").read_text()


def test_slurm_outside_of_a_job_says_how_it_is_called(cluster):
    process = cluster[0]("slurm.sh", "p.yaml")
    assert (process.wait(30), process.stdout.read().startswith("usage: sbatch")) == (2, True)


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("# three machines\nuser@one\n\n  two   # the second\nthree\n")
    return path


def test_ssh_starts_each_host_in_the_same_folder(cluster, hosts, tmp_path):
    start, seen = cluster
    process = start("ssh.sh", str(hosts), "p.yaml", "data.train=it's", PET_NPROC_PER_NODE="4")
    assert process.wait(30) == 3, "the code of rank 0"
    for rank in range(3):
        variables, arguments = seen_by(seen, rank)
        token = variables.pop("RAY_AUTH_TOKEN")
        assert variables == {
            "PET_NNODES": "3",
            "PET_NODE_RANK": str(rank),
            "PET_NPROC_PER_NODE": "4",
            "PET_MASTER_ADDR": "one",
            "PET_MASTER_PORT": "29500",
        }
        assert arguments == [str(tmp_path / "work dir"), "launch", "p.yaml", "data.train=it's"]
    called = (seen / "ssh").read_text()
    assert sorted(
        line.split()[0] for line in called.splitlines() if line.split()[0] in ("user@one", "two", "three")
    ) == [
        "three",
        "two",
        "user@one",
    ]
    assert token not in called


def test_ctrl_c_asks_rank_0_to_stop(cluster, hosts):
    start, seen = cluster
    process = start("ssh.sh", str(hosts), "wait.yaml")
    wait_until(lambda: all((seen / f"rank{rank}.args").is_file() for rank in range(3)), process)
    os.killpg(process.pid, signal.SIGINT)
    wait_until(lambda: (seen / "stopped").is_file(), process)
    assert (seen / "stopped").read_text().split() == ["0"]
    # The stand-ins on the others know nothing of it; when the script is killed, they end too.
    process.kill()
    deadline = time.monotonic() + 30
    while sorted((seen / "stopped").read_text().split()) != ["0", "1", "2"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("text", "said"), [("", "names no host"), ("a\nb\na\n", "names a host twice")])
def test_a_wrong_file_of_hosts_is_reported(cluster, tmp_path, text, said):
    (tmp_path / "hosts").write_text(text)
    process = cluster[0]("ssh.sh", str(tmp_path / "hosts"), "p.yaml")
    assert process.wait(30) == 2
    assert said in process.stdout.read()


def test_a_pod_of_kubeflow_calls_dagrl_with_its_rank(cluster):
    _, seen = cluster
    (job,) = yaml.safe_load_all((LAUNCH / "pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (job["kind"], replicas["Master"]["replicas"]) == ("PyTorchJob", 1)
    for rank, kind, given in ((0, "Master", {}), (2, "Worker", {"PET_NNODES": "4", "PET_NODE_RANK": "2"})):
        (container,) = replicas[kind]["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert [each["name"] for each in container["env"]] == ["RAY_AUTH_TOKEN"]
        done = subprocess.run(
            [*container["command"], *container["args"]],
            env={"PATH": f"{seen.parent / 'bin'}:/usr/bin:/bin", "SEEN": str(seen), "RANK": "0", "WORLD_SIZE": "4"}
            | given,
            timeout=120,
        )
        assert done.returncode == (0 if rank else 3)
        said, arguments = seen_by(seen, rank)
        assert said == {"PET_NNODES": "4", "PET_NODE_RANK": str(rank)}
        assert arguments[1:] == ["launch", "/shared/pipeline.yaml", "--run-dir", "/shared/runs/first"]


def test_a_ray_job_runs_the_pipeline_in_its_cluster():
    from importlib import metadata

    (job,) = yaml.safe_load_all((LAUNCH / "rayjob.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    assert job["spec"]["entrypoint"].startswith("dagrl run ")
    assert cluster["rayVersion"] == metadata.version("ray")
    assert json.dumps(cluster["headGroupSpec"]["template"]) == json.dumps(cluster["workerGroupSpecs"][0]["template"])


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shell_scripts_have_no_traps():
    done = subprocess.run(["shellcheck", *LAUNCH.glob("*.sh")], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout
