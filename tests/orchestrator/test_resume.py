"""Stopped, killed and gone on, with engines that sleep and checkpoints written meanwhile: the same numbers."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Four runs are made for the first test.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


ENGINES = ("actor", "generator")


@dataclass(frozen=True)
class Lives:
    """The run of `unbroken`, but stopped by Ctrl-C, gone on, killed, and gone on again."""

    stopped: Any
    stopped_code: int
    stopped_checkpoints: list[str]
    killed: Any
    killed_checkpoints: dict[str, bool]
    """Checkpoints at the time of the kill, and whether each was complete."""
    finished: Any


@pytest.fixture(scope="module")
def lives(lab, unbroken, tmp_path_factory) -> Lives:
    """After its first stop its engines share a slot and take turns in memory, and every step is saved on the side."""
    folder = tmp_path_factory.mktemp("broken")
    pipeline = lab.write_pipeline(folder, lab.tiny_pipeline())
    checkpoints = folder / "run" / "checkpoints"
    stopped = lab.start(pipeline, folder / "run")
    stopped.wait_for_step(1)
    stopped.process.send_signal(signal.SIGINT)
    code = stopped.wait()
    left = sorted(each.name for each in checkpoints.glob("step_*"))
    turns = (
        "groups.rollout=null",
        "engines.generator.group=train",
        *(f"engines.{name}.sleep=true" for name in ENGINES),
    )
    aside = ("run.async_save=true", "run.save_every=1", "run.keep=2", *turns)
    killed = lab.start(pipeline, folder / "run", *aside)
    killed.wait_for_step(5)
    killed.kill()
    whole = {each.name: is_whole(each) for each in checkpoints.glob("step_*")}
    finished = lab.start(pipeline, folder / "run", *aside)
    assert finished.wait() == 0, finished.output
    return Lives(stopped, code, left, killed, whole, finished)


def is_whole(checkpoint: Path) -> bool:
    sizes = json.loads((checkpoint / "actor" / "files.json").read_text())
    files_are_whole = all((checkpoint / "actor" / name).stat().st_size == size for name, size in sizes.items())
    return files_are_whole and (checkpoint / "state.json").is_file()


def test_ctrl_c_saves_the_step_under_way_and_exits_cleanly(lives):
    assert lives.stopped_code == 0
    assert "stopped after step" in lives.stopped.output
    assert "Traceback" not in lives.stopped.output
    assert len(lives.stopped_checkpoints) == 1
    assert lives.stopped_checkpoints[0] in ("step_1", "step_2", "step_3")


def test_a_checkpoint_in_place_is_complete_after_a_kill(lives):
    assert lives.killed_checkpoints
    assert all(lives.killed_checkpoints.values())


def test_a_stopped_and_killed_run_ends_with_the_metrics_of_an_unbroken_one(lives, unbroken, lab):
    assert lab.comparable(lives.finished.metrics()) == lab.comparable(unbroken.metrics())


def test_the_last_save_is_waited_for_and_only_so_many_stay(lives):
    left = sorted(each.name for each in (lives.finished.folder / "checkpoints").iterdir())
    assert left == ["step_5", "step_6"]
    timeline = json.loads((lives.finished.folder / "timeline.json").read_text())
    written = [event["args"]["step"] for event in timeline if event["ph"] == "X" and event["name"] == "write"]
    assert written[-1] == 6


def test_neither_a_stopped_nor_a_killed_run_leaves_anything_behind(lives):
    assert lives.stopped.left_behind() == []
    assert lives.killed.left_behind() == []
    assert lives.finished.left_behind() == []
