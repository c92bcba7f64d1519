"""`run.async_save`: checkpoints that are written while training goes on."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow


def test_a_run_that_saves_behind_its_back_is_the_same_run(lab, unbroken, tmp_path):
    """Killed while it saves every step, and gone on from whatever was whole."""
    pipeline = lab.tiny_pipeline()
    pipeline["run"] |= {"async_save": True, "save_every": 1, "keep": 2}
    path = lab.write_pipeline(tmp_path, pipeline)
    killed = lab.start(path, tmp_path / "run")
    killed.wait_for_step(3)
    killed.kill()
    whole = list((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert whole
    for folder in whole:
        sizes = json.loads((folder / "actor" / "files.json").read_text())
        assert all((folder / "actor" / name).stat().st_size == size for name, size in sizes.items())
        assert (folder / "state.json").is_file()
    finished = lab.start(path, tmp_path / "run")
    assert finished.wait() == 0, finished.output
    assert lab.comparable(finished.metrics()) == lab.comparable(unbroken.metrics())
    # The last step's save is waited for, and only so many stay.
    assert sorted(folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()) == ["step_5", "step_6"]
    timeline = json.loads((tmp_path / "run" / "timeline.json").read_text())
    written = [event["args"]["step"] for event in timeline if event["ph"] == "X" and event["name"] == "write"]
    assert written[-1] == 6
    assert finished.left_behind() == []


def test_a_write_that_fails_ends_the_run_in_a_sentence(lab, tmp_path):
    """A limit on the size of files stands in for a full disk."""
    import resource

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
