"""How runs fail: one clear end, nothing left behind, nothing lost."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

pytestmark = pytest.mark.slow


def test_a_failing_reward_names_the_sample_and_ends_the_run(lab, tmp_path):
    pipeline = lab.tiny_pipeline()
    pipeline["nodes"]["reward"] = {"op": "reward", "fn": "rewards:fails_on", "args": {"trouble": "3+3="}}
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


def test_a_failing_reward_can_count_as_a_value(lab, tmp_path):
    pipeline = lab.tiny_pipeline()
    pipeline["nodes"]["reward"] = {
        "op": "reward",
        "fn": "rewards:fails_on",
        "args": {"trouble": "3+3="},
        "on_error": -1.0,
    }
    pipeline["run"] = {"steps": 2}
    run = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run")
    assert run.wait() == 0, run.output
    # Two steps of eight prompts each go once over the sixteen of the file.
    assert sum(line["reward/failed_fraction"] for line in run.metrics()) == pytest.approx(1 / 8)


def test_a_killed_worker_is_named_and_the_run_ends(lab, tmp_path):
    pipeline = lab.tiny_pipeline()
    pipeline["run"] = {"steps": 500, "save_every": 1}
    run = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run")
    run.wait_for_step(2)
    worker = json.loads((run.folder / "workers.json").read_text())["actor/0"]
    os.kill(worker["pid"], signal.SIGKILL)
    assert run.wait() == 1
    assert "actor/0" in run.output
    assert "process died" in run.output
    assert "Traceback" not in run.output
    assert run.left_behind() == []
    assert list((run.folder / "checkpoints").glob("step_*"))


def test_two_runs_cannot_share_a_folder(lab, tmp_path):
    pipeline = lab.write_pipeline(tmp_path, lab.tiny_pipeline())
    first = lab.start(pipeline, tmp_path / "run")
    while not (tmp_path / "run" / "pipeline.yaml").exists():
        assert first.process.poll() is None, first.output
    second = lab.start(pipeline, tmp_path / "run", "name=other")
    assert second.wait() == 1
    assert f"another run (pid {first.process.pid}) is writing to" in second.output
    first.process.send_signal(signal.SIGINT)
    first.process.send_signal(signal.SIGINT)
    first.wait()
