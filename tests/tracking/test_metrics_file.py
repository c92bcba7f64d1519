"""metrics.jsonl: a line a step, whatever happens."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dagrl.tracking.metrics_file import MetricsFile


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write_steps(folder: Path, last: int, resumed_step: int | None = None) -> None:
    tracker = MetricsFile()
    tracker.start(folder, {}, resumed_step)
    for step in range((resumed_step or 0) + 1, last + 1):
        tracker.log(step, {"reward/mean": step / 4})
    tracker.close(ok=True)


def test_a_line_is_in_the_file_as_soon_as_it_is_logged(tmp_path):
    tracker = MetricsFile()
    tracker.start(tmp_path / "new" / "run", {}, None)
    tracker.log(1, {"reward/mean": 0.5, "policy_version": 1})
    assert (tmp_path / "new/run/metrics.jsonl").read_text() == '{"step": 1, "reward/mean": 0.5, "policy_version": 1}\n'
    tracker.close(ok=True)


def test_values_without_a_json_form_become_null_or_a_number(tmp_path):
    tracker = MetricsFile()
    tracker.start(tmp_path, {}, None)
    tracker.log(1, {"a": math.nan, "b": -math.inf, "c": np.float32(0.25), "d": np.int64(3)})
    tracker.close(ok=True)
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record == {"step": 1, "a": None, "b": None, "c": 0.25, "d": 3}


@pytest.mark.parametrize(("resumed_step", "kept"), [(None, []), (0, []), (2, [1, 2]), (9, [1, 2, 3, 4])])
def test_resuming_cuts_later_steps(tmp_path, resumed_step, kept):
    write_steps(tmp_path, 4)
    tracker = MetricsFile()
    tracker.start(tmp_path, {}, resumed_step)
    assert steps(tmp_path) == kept
    tracker.close(ok=True)


def test_samples_of_removed_steps_are_counted_as_lost(tmp_path):
    def start(resumed: int | None) -> MetricsFile:
        tracker = MetricsFile()
        tracker.start(tmp_path, {}, resumed)
        return tracker

    def line(number: int) -> dict:
        return json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[number - 1])

    tracker = start(None)
    for step in (1, 2, 3):
        tracker.log(step, {"samples/generated": step, "train/a/tokens/generated": 10 * step, "reward/mean": 1.0})
    tracker.add_lost({"samples/generated": 100, "tokens/generated": 0, "samples/trained": 7})
    assert line(3)["samples/lost"] == 100 and "tokens/lost" not in line(3)
    tracker.close(ok=False)
    tracker = start(2)
    assert line(2) == {
        "step": 2,
        "samples/generated": 2,
        "train/a/tokens/generated": 20,
        "reward/mean": 1.0,
        "samples/lost": 103,
        "train/a/tokens/lost": 30,
    }
    tracker.close(ok=True)
    start(2).close(ok=True)
    assert line(2)["samples/lost"] == 103, "counted once"
    start(1).close(ok=True)
    assert (line(1)["samples/lost"], line(1)["train/a/tokens/lost"]) == (105, 50)
    start(0).close(ok=True)
    assert steps(tmp_path) == []


def test_a_resumed_run_continues_in_the_same_file(tmp_path):
    write_steps(tmp_path, 4)
    write_steps(tmp_path, 5, resumed_step=2)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


TORN = [
    '{"step": 3, "rew',
    '{"step": 3}',
    '{"step": 3, "a": "\udcc3',
    '{"step": 3e999}\n',
    "\0" * 9,
    "[" * 10**5,
    "\x85{",
    "[]",
]


@pytest.mark.parametrize("torn", TORN, ids=range(len(TORN)))
def test_a_torn_last_line_is_cut(tmp_path, torn):
    write_steps(tmp_path, 2)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn.encode("utf-8", "surrogateescape"))
    write_steps(tmp_path, 3, resumed_step=2)
    # The torn line may be of a step that the checkpoint holds: it is not whole, so it is not kept either.
    assert steps(tmp_path) == [1, 2, 3]


def test_a_strange_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a step's metrics"):
        MetricsFile().start(tmp_path, {}, 2)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = MetricsFile()
    tracker.start(tmp_path, {}, None)
    with pytest.raises(OSError, match=r"cannot write .*metrics\.jsonl: No space left on device$"):
        tracker.log(1, {"reward/mean": 1.0})
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        tracker.close(ok=False)
    tracker.close(ok=False)


def test_a_disk_that_fills_anywhere_in_a_line_leaves_a_file_to_resume_from(tmp_path):
    """A limit on the size of files stands in for the disk: both take the part of a write that they have room for."""
    program = f"""
import pathlib, resource
from dagrl.tracking.metrics_file import MetricsFile
def limited(room):
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
for room in range(25):
    folder = pathlib.Path({str(tmp_path)!r}, str(room))
    tracker = MetricsFile()
    tracker.start(folder, {{}}, None)
    tracker.log(1, {{"reward": 0.5}})
    limited((folder / "metrics.jsonl").stat().st_size + room)
    for act in (lambda: tracker.log(2, {{"reward": 0.5}}), lambda: tracker.close(ok=False)):
        try:
            act()
        except OSError as error:
            assert str(error).endswith("metrics.jsonl: File too large"), error
        else:
            raise AssertionError("the line is written")
    limited(resource.RLIM_INFINITY)
    tracker = MetricsFile()
    tracker.start(folder, {{}}, 1)
    tracker.log(2, {{"reward": 0.5}})
    tracker.close(ok=True)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    line = '{"step": 1, "reward": 0.5}\n'
    for folder in tmp_path.iterdir():
        assert (folder / "metrics.jsonl").read_text() == line + line.replace("1", "2")


@pytest.mark.parametrize("how", ["folder", "file", "moved", "replaced"])
def test_a_file_that_was_removed_is_an_error_at_the_next_step(tmp_path, how):
    folder = tmp_path / "run"
    tracker = MetricsFile()
    tracker.start(folder, {}, None)
    tracker.log(1, {"reward/mean": 1.0})
    if how == "folder":
        shutil.rmtree(folder)
    elif how == "moved":
        folder.rename(tmp_path / "elsewhere")
    else:
        (folder / "metrics.jsonl").unlink()
    if how == "replaced":
        (folder / "metrics.jsonl").touch()
    with pytest.raises(OSError, match=r"cannot write .*metrics\.jsonl: it was removed during the run$"):
        tracker.log(2, {"reward/mean": 1.0})
    tracker.close(ok=False)


def test_a_killed_process_leaves_every_step_that_it_logged(tmp_path):
    program = f"""
import time
from pathlib import Path
from dagrl.tracking.metrics_file import MetricsFile
tracker = MetricsFile()
tracker.start(Path({str(tmp_path)!r}), {{}}, None)
for step in range(1, 51):
    tracker.log(step, {{"reward/mean": 0.5}})
Path({str(tmp_path / "done")!r}).touch()
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 30
    while not (tmp_path / "done").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert steps(tmp_path) == list(range(1, 51))


def test_later_metrics_of_a_step_are_added_to_its_line(tmp_path):
    write_steps(tmp_path, 3)
    for step, value in ((2, 0.5), (0, math.nan), (2, 0.75), (5, 1.0)):
        tracker = MetricsFile()
        tracker.start(tmp_path, {}, 3)
        tracker.log(step, {"val/reward/mean": value})
        tracker.close(ok=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 0, "val/reward/mean": None},
        {"step": 1, "reward/mean": 0.25},
        {"step": 2, "reward/mean": 0.5, "val/reward/mean": 0.75},
        {"step": 3, "reward/mean": 0.75},
        {"step": 5, "val/reward/mean": 1.0},
    ]
