"""Checkpoints: whole or not at all."""

from __future__ import annotations

import json

import pytest

from dagrl.runtime.checkpoint import Checkpoints, RunState


def save(checkpoints: Checkpoints, step: int) -> None:
    aside = checkpoints.begin(step)
    (aside / "actor").mkdir()
    (aside / "actor" / "weights").write_text(f"weights of {step}")
    checkpoints.finish(aside, RunState(step, step * 10, "model"))


def test_the_newest_is_found_by_number_not_by_name(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=10)
    for step in (9, 10, 2):
        save(checkpoints, step)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.name == "step_10"
    assert checkpoints.read(newest) == RunState(10, 100, "model")


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        save(checkpoints, step)
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_3"]


def test_a_save_that_was_cut_off_is_never_picked_and_does_not_hinder_the_next(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)
    torn = checkpoints.begin(2)
    (torn / "actor").mkdir()
    (torn / "actor" / "weights").write_text("half")
    (tmp_path / "checkpoints" / "step_3").mkdir()
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.name == "step_1"
    assert list(checkpoints.begin(2).iterdir()) == []
    checkpoints.remove_torn()
    assert not torn.exists()
    assert newest.is_dir()


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 4)
    aside = checkpoints.begin(4)
    final = checkpoints.finish(aside, RunState(4, 41, "model"))
    assert checkpoints.read(final).position == 41
    assert not (final / "actor").exists()


def test_prompts_that_wait_are_kept_and_an_older_checkpoint_has_none(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    aside = checkpoints.begin(4)
    state = RunState(4, 40, "model", carried=(37, 31))
    final = checkpoints.finish(aside, state)
    assert checkpoints.read(final) == state
    fields = json.loads((final / "state.json").read_text())
    del fields["carried"]
    (final / "state.json").write_text(json.dumps(fields))
    assert checkpoints.read(final) == RunState(4, 40, "model")


def test_a_checkpoint_of_an_unknown_format_is_refused_with_its_writer(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 4)
    state = tmp_path / "checkpoints" / "step_4" / "state.json"
    state.write_text(json.dumps({"format": 99, "dagrl": "7.0", "step": 4}))
    with pytest.raises(ValueError, match=r"written by dagrl 7\.0 in format 99"):
        checkpoints.read(state.parent)
