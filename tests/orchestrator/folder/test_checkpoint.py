"""Checkpoints: whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.config.schema import KeepBestSpec, RunSpec
from dagrl.orchestrator.folder.checkpoint import Checkpoints, RunState, Score


def save(checkpoints: Checkpoints, step: int, *, large: bool = False, score: Score | None = None) -> None:
    aside = checkpoints.begin(step)
    (aside / "actor").mkdir()
    (aside / "actor" / "weights").write_text(f"weights of {step}")
    if large:
        (aside / "actor" / "moments").write_bytes(bytes(range(1, 256)) * 5000)
        (aside / "actor" / "layout").write_text("{}")
    checkpoints.finish(aside, RunState(step, "model", score=score))


def test_the_newest_is_found_by_number_not_by_name(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=10)
    for step in (9, 10, 2):
        save(checkpoints, step)
    newest = checkpoints.find().folder
    assert newest is not None
    assert newest.name == "step_10"
    assert checkpoints.read(newest) == RunState(10, "model")


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        save(checkpoints, step)
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_3"]


def test_all_are_kept_where_asked(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep="all", keep_best=KeepBestSpec())
    for step in range(1, 7):
        save(checkpoints, step, score=Score("val/reward/mean", -step))
    assert checkpoints.steps() == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "checkpoints" / "best").read_text() == "step_1\n"


def left(folder: Path) -> list[int]:
    return Checkpoints(folder, keep=1).steps()


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("max", {2: 0.1, 4: 0.9, 6: 0.5, 8: 0.2, 10: 0.3}, 4),
        ("min", {2: 0.4, 4: 0.9, 6: 0.2, 8: 0.5, 10: 0.3}, 6),
        ("max", {2: 0.5, 4: 0.5, 6: 0.5, 8: 0.5, 10: 0.5}, 2),
        ("max", {2: None, 4: 0.1, 6: None, 8: None, 10: None}, 4),
        ("max", {2: 0.1, 4: 0.2, 6: 0.3, 8: 0.4, 10: 0.5}, 10),
    ],
)
def test_the_best_stays_beside_the_newest_and_is_named(tmp_path, mode, values, best):
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=KeepBestSpec(metric="val/reward/mean", mode=mode))
    for step, value in values.items():
        save(checkpoints, step, score=Score("val/reward/mean", value) if value is not None else None)
    assert left(tmp_path) == sorted({best, 8, 10})
    assert checkpoints.best() == checkpoints.of_step(best)
    assert (tmp_path / "checkpoints" / "best").read_text() == f"step_{best}\n"
    assert checkpoints.read(checkpoints.of_step(best)).score == Score("val/reward/mean", values[best])


def test_the_best_is_known_again_by_a_run_that_continues(tmp_path):
    for step, value in ((2, 0.9), (4, 0.5), (6, 0.4)):
        best = KeepBestSpec(metric="val/reward/mean")
        save(Checkpoints(tmp_path, keep=1, keep_best=best), step, score=Score("val/reward/mean", value))
    assert left(tmp_path) == [2, 6]
    save(Checkpoints(tmp_path, keep=1, keep_best=KeepBestSpec(metric="val/other")), 8, score=Score("val/other", 0.1))
    assert left(tmp_path) == [8], "scores of another metric say nothing"


def test_without_any_score_none_is_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=KeepBestSpec())
    for step in (2, 4):
        save(checkpoints, step)
    assert checkpoints.best() is None
    assert left(tmp_path) == [4]
    assert not (tmp_path / "checkpoints" / "best").exists()


def test_a_torn_state_is_not_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3, keep_best=KeepBestSpec())
    for step, value in ((2, 0.9), (4, 0.5)):
        save(checkpoints, step, score=Score("val/reward/mean", value))
    (checkpoints.of_step(2) / "state.json").write_text("{")
    assert checkpoints.best() == checkpoints.of_step(4)


def test_a_save_that_was_cut_off_is_never_picked_and_does_not_hinder_the_next(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)
    torn = checkpoints.begin(2)
    (torn / "actor").mkdir()
    (torn / "actor" / "weights").write_text("half")
    (tmp_path / "checkpoints" / "step_3").mkdir()
    newest = checkpoints.find().folder
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
    final = checkpoints.finish(aside, RunState(4, "model", {"passed": 41}))
    assert checkpoints.read(final).order == {"passed": 41}
    assert not (final / "actor").exists()


def test_prompts_that_wait_are_kept_and_an_older_checkpoint_has_none(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    aside = checkpoints.begin(4)
    order = {"passed": 40, "sampler": {"rates": [0.5, float("inf")]}}
    baselines = {"advantage": {"first player": 0.1 + 0.2}}
    weights = {"advantage": (0.1 + 0.2, 0.3)}
    state = RunState(4, "model", order, carried=(37, 31), kl_weights=weights, baselines=baselines)
    final = checkpoints.finish(aside, state)
    assert checkpoints.read(final) == state
    fields = json.loads((final / "state.json").read_text())
    for later in ("carried", "kl_weights", "baselines", "files", "seal"):
        del fields[later]
    (final / "state.json").write_text(json.dumps(fields | {"position": 40}))
    (final / "order.json").unlink()
    assert checkpoints.read(final) == RunState(4, "model", {"position": 40, "passed": 40})


def test_a_checkpoint_of_an_unknown_format_is_refused_with_its_writer(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 4)
    state = tmp_path / "checkpoints" / "step_4" / "state.json"
    state.write_text(json.dumps({"format": 99, "dagrl": "7.0", "step": 4}))
    for look in (checkpoints.find, lambda: checkpoints.read(state.parent)):
        with pytest.raises(ValueError, match=r"written by dagrl 7\.0 in format 99"):
            look()


def test_an_old_one_that_cannot_be_removed_ends_nothing_and_is_counted_no_more(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 2)
    rmdir = os.rmdir

    def busy(path, **options):
        if ".step_2." in str(path):
            raise OSError(errno.ENOTEMPTY, "a file is still read")
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", busy)
    save(checkpoints, 4)
    assert checkpoints.steps() == [4]
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == [".step_2.partial-old", "step_4"]
    monkeypatch.undo()
    checkpoints.remove_torn()
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["step_4"]


def test_a_state_that_lacks_something_is_torn(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 4)
    save(checkpoints, 6)
    (tmp_path / "checkpoints" / "step_6" / "state.json").write_text(
        json.dumps({"format": 1, "dagrl": "0.1", "step": 6})
    )
    found = checkpoints.find()
    assert found.state is not None and found.state.step == 4
    assert [each.endswith("state.json lacks 'model'") for each in found.torn.values()] == [True]


HARMS = st.sampled_from(["removed", "cut", "longer", "changed", "emptied"])


@settings(deadline=None, max_examples=50)
@given(which=st.integers(0, 4), harm=HARMS, where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_whatever_happens_to_a_file_of_the_newest_the_one_before_is_taken(which, harm, where, bit) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), keep=3)
        for step in (2, 4, 6):
            save(checkpoints, step, large=step == 6)
        files = sorted(path for path in checkpoints.of_step(6).rglob("*") if path.is_file())
        assert len(files) == 5
        victim = files[which]
        content = bytearray(victim.read_bytes())
        place = int(where * len(content))
        match harm:
            case "removed":
                victim.unlink()
            case "cut":
                victim.write_bytes(content[:place])
            case "longer":
                victim.write_bytes(content + b"\0")
            case "emptied":
                # As a file is whose blocks never came to the disk: a page or more of zeros.
                content[place : place + 2**14] = bytes(len(content[place : place + 2**14]))
                victim.write_bytes(content)
            case "changed":
                if len(content) <= 2**20:
                    content[place] ^= 1 << bit
                else:
                    content[place : place + 2**14] = b"?" * len(content[place : place + 2**14])
                victim.write_bytes(content)
        found = checkpoints.find()
        assert found.folder == checkpoints.of_step(4)
        assert found.state == RunState(4, "model")
        ((torn, what),) = found.torn.items()
        assert torn == checkpoints.of_step(6)
        assert f"the checkpoint {torn} is torn: {victim.relative_to(torn)}" in what


def test_a_torn_one_is_put_aside_so_that_it_takes_no_whole_one_s_place(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for _ in "once", "and the next time that it comes to that step":
        save(checkpoints, 6)
        (checkpoints.of_step(6) / "actor" / "weights").unlink()
        assert checkpoints.set_aside(checkpoints.of_step(6)).name == "step_6.torn"
    save(checkpoints, 3)
    assert checkpoints.find().folder == checkpoints.of_step(3)
    assert checkpoints.steps() == [3]


def test_if_no_checkpoint_is_complete_all_are_named(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (2, 4):
        save(checkpoints, step)
        (checkpoints.of_step(step) / "state.json").write_text("{")
    found = checkpoints.find()
    assert found.folder is None
    assert list(found.torn) == [checkpoints.of_step(4), checkpoints.of_step(2)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tests", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs a small file system, which cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_on_a_full_disk_the_last_checkpoint_stays_and_room_is_all_that_it_takes(small_disk):
    checkpoints = Checkpoints(small_disk, keep=2)
    save(checkpoints, 2)
    other = small_disk / "something else"
    aside = checkpoints.begin(4)
    (aside / "weights").write_bytes(bytes(60 * 1024))
    with pytest.raises(OSError, match="No space left"), other.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    with pytest.raises(
        OSError, match=r"cannot write the checkpoint to .*: No space left on device; make room, or lower"
    ):
        checkpoints.finish(aside, RunState(4, "model"))
    checkpoints.remove_torn()
    found = checkpoints.find()
    assert (found.folder, found.torn) == (checkpoints.of_step(2), {})
    other.unlink()
    save(checkpoints, 4)
    assert checkpoints.find().folder == checkpoints.of_step(4)


@pytest.mark.parametrize(
    ("run", "step", "position", "finished"),
    [
        ({"steps": 4}, 3, 999, False),
        ({"steps": 4}, 4, 0, True),
        # Two passes over 16 prompts, in 8 steps at most.
        ({"steps": 8, "epochs": 2}, 5, 31, False),
        ({"steps": 8, "epochs": 2}, 5, 32, True),
        ({"steps": 8, "epochs": 2}, 8, 30, True),
        ({"steps": 1, "epochs": 0.1}, 0, 1, False),
        ({"steps": 1, "epochs": 0.1}, 0, 2, True),
    ],
)
def test_a_run_is_finished_after_its_steps_or_its_prompts(run, step, position, finished):
    assert RunState(step, "model", {"passed": position}).finishes(RunSpec.model_validate(run), rows=16) is finished
