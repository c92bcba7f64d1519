"""Stopped, killed and gone on: the same numbers as if nothing had happened."""

from __future__ import annotations

import signal

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def broken(lab, unbroken, tmp_path_factory):
    """The run of `unbroken`, but stopped by Ctrl-C, gone on, killed, and gone on again. Yields the three lives."""
    folder = tmp_path_factory.mktemp("broken")
    pipeline = lab.write_pipeline(folder, lab.tiny_pipeline())
    stopped = lab.start(pipeline, folder / "run")
    stopped.wait_for_step(1)
    stopped.process.send_signal(signal.SIGINT)
    stopped_code = stopped.wait()
    checkpoints = sorted(each.name for each in (folder / "run" / "checkpoints").glob("step_*"))
    killed = lab.start(pipeline, folder / "run")
    killed.wait_for_step(5)
    killed.kill()
    finished = lab.start(pipeline, folder / "run")
    assert finished.wait() == 0, finished.output
    return {
        "stopped": stopped,
        "code": stopped_code,
        "checkpoints": checkpoints,
        "killed": killed,
        "finished": finished,
    }


def test_ctrl_c_saves_the_step_under_way_and_exits_cleanly(broken):
    assert broken["code"] == 0
    assert "stopped after step" in broken["stopped"].output
    assert "Traceback" not in broken["stopped"].output
    assert len(broken["checkpoints"]) == 1
    assert broken["checkpoints"][0] in ("step_1", "step_2", "step_3")


def test_a_stopped_and_killed_run_ends_with_the_metrics_of_an_unbroken_one(broken, unbroken, lab):
    assert lab.comparable(broken["finished"].metrics()) == lab.comparable(unbroken.metrics())


def test_neither_a_stopped_nor_a_killed_run_leaves_anything_behind(broken):
    assert broken["stopped"].left_behind() == []
    assert broken["killed"].left_behind() == []
    assert broken["finished"].left_behind() == []
