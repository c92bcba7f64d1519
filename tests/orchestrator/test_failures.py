"""How runs fail: one clear end, nothing left behind, nothing lost."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest

from dagrl.orchestrator.cluster import reaper

pytestmark = pytest.mark.slow


def test_a_failing_reward_names_the_sample_and_ends_the_run(lab, tmp_path):
    pipeline = lab.tiny_pipeline()
    pipeline["nodes"]["reward"] = {"op": "reward", "fn": "rewards:fails_on", "args": {"trouble": "3+3="}}
    pipeline["run"]["record"] = ["reward"]
    run = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run")
    assert run.wait() == 1
    last_lines = run.output.splitlines()[-12:]
    text = "\n".join(last_lines)
    assert re.search(r"node +reward \(step \d\)", text)
    assert re.search(r"worker +host/0 \(host .*, pid \d+\)", text)
    assert "this reward knows no 3+3=" in text
    assert re.search(r"rewards\.py:\d+", text)
    assert re.search(r"sample \d+", text)
    assert "Traceback" not in run.output
    assert run.left_behind() == []
    # What the node had taken is recorded, and it can be seen to fail again.
    (step,) = re.findall(r"reward \(step (\d)\)", text)
    replayed = lab.call("replay", run.folder, "--step", step)
    assert replayed.returncode == 1, replayed.stderr
    assert "reward fails, as it did in the run\n" in replayed.stdout
    assert "this reward knows no 3+3=" in replayed.stdout
    debugged = lab.call("replay", run.folder, "--step", step, "--node", "reward", "--debug")
    assert debugged.returncode == 1 and "KeyError: 'this reward knows no 3+3='" in debugged.stderr


def test_a_killed_worker_that_may_not_be_made_up_for_is_named_and_the_run_ends(lab, tmp_path):
    """And while it ran, its folder was its own."""
    pipeline = lab.tiny_pipeline()
    pipeline["run"] = {"steps": 500, "save_every": 1, "max_restarts": 0}
    path = lab.write_pipeline(tmp_path, pipeline)
    run = lab.start(path, tmp_path / "run")
    run.wait_for_step(2)
    second = lab.start(path, tmp_path / "run", "name=other")
    assert second.wait() == 2
    assert f"another run (pid {run.process.pid}) is writing to" in second.output
    worker = json.loads((run.folder / "workers.json").read_text())["actor/0"]
    os.kill(worker["pid"], signal.SIGKILL)
    assert run.wait() == 1
    assert "actor/0" in run.output
    assert "process died" in run.output
    assert "Traceback" not in run.output
    assert run.left_behind() == []
    assert list((run.folder / "checkpoints").glob("step_*"))


@pytest.mark.parametrize(
    ("sign", "codes"), [("Ray is starting", (130, -signal.SIGABRT)), ("starting host", (130,))], ids=["Ray", "workers"]
)
def test_sigterm_ends_a_run_that_starts_and_all_its_processes(lab, tmp_path, sign, codes):
    """`sign`: when the signal comes; words of the run's output, or as soon as Ray has a worker.

    While Ray's libraries connect, they answer the signal themselves, by abort().
    """
    pipeline = lab.tiny_pipeline()
    pipeline["run"] |= {"host_workers": 8}
    run = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run")
    deadline = time.monotonic() + 120
    # Ray's own node process names the workers' program on its command line, too.
    while sum(ours(each, run) for each in reaper.started_with("default_worker.py")) < 3 or (
        sign != "Ray is starting" and sign not in run.output
    ):
        assert run.process.poll() is None and time.monotonic() < deadline, run.output
        time.sleep(0.05)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(30) in codes, run.output
    assert "executors started" not in run.output
    assert "Traceback" not in run.output
    assert run.left_behind() == []


def ours(identity, run):
    """Whether the process belongs to the run."""
    return int(identity.partition(":")[0]) in reaper.descendants(run.process.pid)


def test_a_killed_control_store_of_ray_is_replaced_and_the_run_continues(lab, unbroken, tmp_path):
    """Ray's driver would train on to the end of the run, wait for a minute and exit."""
    run = lab.start(lab.write_pipeline(tmp_path, lab.tiny_pipeline()), tmp_path / "run")
    run.wait_for_step(2)
    programs = {pid: Path(f"/proc/{pid}/comm") for pid in reaper.descendants(run.process.pid)}
    (store,) = (pid for pid, name in programs.items() if name.read_text().strip() == "gcs_server")
    os.kill(store, signal.SIGKILL)
    assert run.wait() == 0, run.output
    assert f"Ray's gcs_server (pid {store}) cannot go on: the process was killed (SIGKILL)" in run.output
    assert lab.comparable(run.metrics()) == lab.comparable(unbroken.metrics())
    assert run.left_behind() == []


@pytest.mark.soak
def test_a_save_on_the_side_that_fails_ends_the_run_in_a_sentence(lab, tmp_path, monkeypatch):
    """A limit on the size of files stands in for a full disk."""
    # A module that the worker imports late would be compiled to a file that the limit cuts short.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    pipeline = lab.tiny_pipeline()
    pipeline["run"] = {"steps": 500, "seed": 3, "async_save": True, "save_every": 2}
    path = lab.write_pipeline(tmp_path, pipeline)
    run = lab.start(path, tmp_path / "run")
    run.wait_for_step(1)
    worker = json.loads((tmp_path / "run" / "workers.json").read_text())["actor/0"]["pid"]
    # Python ignores the signal that goes with the limit, so the write itself fails.
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (20000, 20000))
    assert run.wait() == 1
    last_lines = "\n".join(run.output.splitlines()[-12:])
    assert "cannot write the checkpoint to" in last_lines
    assert "make room, or lower run.keep" in last_lines
    assert "Traceback" not in run.output
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        assert (folder / "actor" / "files.json").is_file(), f"{folder} stays and is not whole"
    assert run.left_behind() == []
