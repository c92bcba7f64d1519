"""The measuring of processes, on real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from process_sizes import MIB, Change, ProcessSizes, object_store_bytes, process_name, table

GROWING = """
import sys

kept = []
while True:
    print(len(kept), flush=True)
    sys.stdin.readline()
    kept.append(b"." * 5_000_000)
"""


@pytest.fixture
def growing():
    """A process that keeps 5 MB more for each line."""
    with subprocess.Popen([sys.executable, "-c", GROWING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_growing_process_is_found_below_its_parent_and_called_by_its_name(growing, tmp_path):
    workers = tmp_path / "workers.json"
    workers.write_text(json.dumps({"actor/0": {"host": "here", "pid": growing.pid}}))
    sizes = ProcessSizes(window=2)
    for step in range(10):
        growing.stdout.readline()
        sizes.sample(step, growing.pid, workers)
        growing.stdin.write(b"\n")
        growing.stdin.flush()
    (alone,) = sizes.changes(since=2)
    assert alone.name == f"driver ({growing.pid})"
    # Medians of steps 2 and 3, and of 8 and 9.
    assert alone.after - alone.before == pytest.approx(30e6, rel=0.05)
    below = ProcessSizes()
    below.sample(0, os.getpid(), workers)
    assert f"actor/0 ({growing.pid})" in [each.name for each in below.changes(since=0)]


def _sizes(*samples: tuple[int, int], window: int = 10) -> ProcessSizes:
    sizes = ProcessSizes(window)
    for step, nbytes in samples:
        sizes.add(step, "1", f"ray::Worker {step}", nbytes)
    return sizes


@pytest.mark.parametrize(
    ("samples", "before", "after"),
    [
        # What it takes before the step counts as little as a peak in the midst of its work.
        ([(1, 100), (50, 200), (55, 900), (59, 210), (60, 500), (91, 220), (95, 900), (99, 230)], 210, 230),
        # Started later: from its own start.
        ([(70, 300), (75, 300), (99, 400)], 300, 400),
        # Ended early.
        ([(1, 100), (20, 200)], 200, 200),
        ([(1, 100), (60, 300)], 300, 300),
    ],
)
def test_sizes_are_compared_from_the_step_or_the_start_to_the_end(samples, before, after):
    last = samples[-1][0]
    assert _sizes(*samples).changes(since=50) == [Change(f"ray::Worker {last}", before, after)]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/site/ray/core/gcs_server", "--log_dir=/tmp", "-m"], "gcs_server"),
        (["ray::Worker.run_whole"], "ray::Worker"),
        (["/bin/python", "-u", "/site/ray/dashboard/dashboard.py", "--host=x.py"], "dashboard.py"),
        (["/bin/python", "-m", "dagrl.cli", "run"], "dagrl.cli"),
        (["/bin/python", "-I", "/site/reaper.py", "some words"], "reaper.py"),
        ([], "?"),
    ],
)
def test_a_process_is_called_by_what_it_runs(command, name):
    assert process_name(command) == name


def test_an_object_store_is_as_large_as_its_files_are(tmp_path):
    path = Path("/dev/shm") / f"{tmp_path.name}-plasma"
    with path.open("wb") as file:
        before = object_store_bytes(os.getpid())
        path.unlink()
        os.ftruncate(file.fileno(), 8 * MIB)
        assert object_store_bytes(os.getpid()) == before, "nothing is in it yet"
        file.write(b"." * MIB)
        file.flush()
        assert object_store_bytes(os.getpid()) == before + MIB


def test_the_table_has_a_line_for_each_process():
    lines = table([Change("gcs_server (7)", 50 * MIB, 60 * MIB), Change("driver (1)", 100 * MIB, 99 * MIB)], 500)
    assert lines.splitlines() == [
        "process          step 500      the end  change",
        "gcs_server (7)    50.0 MiB   60.0 MiB  +20.0%",
        "driver (1)       100.0 MiB   99.0 MiB   -1.0%",
    ]
