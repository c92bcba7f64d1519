"""Guests of a run: done in order, in their own time, and never the end of it."""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dagrl.tracking import background_tracker as guest
from dagrl.tracking.background_tracker import BackgroundTracker, TrackerFailedError, failures_of
from dagrl.tracking.base import SampleTable

TABLE = SampleTable(("prompt",), (("1+1=",),))


class Recorder:
    """A tracker that remembers what it was told, and from where; it may be told to fail or to wait."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.threads: set[int] = set()
        self.fail_at: int | None = None
        self.error: Exception = OSError("the server is gone\nand much more")
        self.gate = threading.Event()
        self.gate.set()

    def _did(self, *call: Any) -> None:
        self.gate.wait()
        self.threads.add(threading.get_ident())
        self.calls.append(call)

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_step: int | None) -> None:
        self._did("start", resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._did("log", step, metrics)
        if step == self.fail_at:
            raise self.error

    def samples(self, step: int, table: SampleTable) -> None:
        self._did("samples", step, table)

    def close(self, ok: bool) -> None:
        self._did("close", ok)


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_all_is_done_in_order_in_another_thread(recorder: Recorder, notes: list[str], tmp_path: Path) -> None:
    tracker = BackgroundTracker("mlflow", recorder, notes.append)
    tracker.start(tmp_path, {}, 3)
    metrics = {"reward/mean": 0.5}
    tracker.log(4, metrics)
    metrics["reward/mean"] = 9.0
    tracker.samples(4, TABLE)
    tracker.close(ok=True)
    expected = [("start", 3), ("log", 4, {"reward/mean": 0.5}), ("samples", 4, TABLE), ("close", True)]
    assert recorder.calls == expected
    assert threading.get_ident() not in recorder.threads
    assert notes == []


def test_a_failure_is_one_note_and_the_run_continues(recorder: Recorder, notes: list[str], tmp_path: Path) -> None:
    recorder.fail_at = 1
    tracker = BackgroundTracker("mlflow", recorder, notes.append)
    tracker.start(tmp_path, {}, None)
    for step in range(1, 50):
        tracker.log(step, {})
    tracker.close(ok=True)
    tracker.close(ok=True)
    assert notes == ["mlflow stopped: the server is gone; metrics.jsonl has every step"]
    assert recorder.calls[-1] == ("close", False)
    assert len([call for call in recorder.calls if call[0] == "log"]) == 1


def test_a_stuck_tracker_blocks_no_step(
    recorder: Recorder, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "FINISH_TIMEOUT_S", 0.05)
    monkeypatch.setattr(guest, "LONGEST_QUEUE", 10)
    recorder.gate.clear()
    tracker = BackgroundTracker("swanlab", recorder, notes.append)
    tracker.start(tmp_path, {}, None)
    for step in range(1, 50):
        tracker.log(step, {})
    tracker.close(ok=True)
    assert notes == [
        "swanlab is 10 steps behind and is dropped; metrics.jsonl has every step",
        "waiting for swanlab to finish, 0.05 s at most",
        notes[-1],
    ]
    assert re.fullmatch(r"swanlab was still busy after 0\.\d+ s; metrics\.jsonl has every step", notes[-1])
    monkeypatch.setattr(guest, "FINISH_TIMEOUT_S", 60.0)
    recorder.gate.set()
    tracker.close(ok=True)
    assert len(notes) == 3, "once it answers again, it ends"
    assert recorder.calls[-1] == ("close", False)
    assert not [call for call in recorder.calls if call[0] == "log"]


def test_ctrl_c_ends_the_wait_for_a_guest_and_nothing_else(
    recorder: Recorder, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    recorder.gate.clear()
    tracker = BackgroundTracker("mlflow", recorder, notes.append)
    tracker.start(tmp_path, {}, None)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", join)
        tracker.close(ok=True)
    assert len(notes) == 1 and notes[0].startswith("mlflow was still busy after ")
    recorder.gate.set()
    tracker.close(ok=True)
    assert recorder.calls[-1] == ("close", True)


def test_an_internal_error_is_raised_in_the_driver(recorder: Recorder, tmp_path: Path) -> None:
    recorder.fail_at, recorder.error = 1, KeyError("reward")
    tracker = BackgroundTracker("mlflow", recorder, lambda note: None)
    tracker.start(tmp_path, {}, None)
    tracker.log(1, {})
    with pytest.raises(KeyError, match="reward"):
        tracker.close(ok=True)


def test_closing_a_tracker_that_never_started_is_harmless(recorder: Recorder) -> None:
    BackgroundTracker("mlflow", recorder, lambda note: None).close(ok=False)
    assert recorder.calls == []


def test_a_package_that_is_not_there_is_named_with_its_remedy() -> None:
    remedy = r"it is not installed; pip install 'dagrl\[no_such_tracker\]'"
    with pytest.raises(TrackerFailedError, match=remedy), failures_of("no_such_tracker"):
        importlib.import_module("no_such_tracker")


def test_errors_name_their_origin() -> None:
    import json

    with pytest.raises(TrackerFailedError, match="Expecting value"), failures_of("json"):
        json.loads("x")
    with pytest.raises(ValueError, match="ours"), failures_of("json"):
        raise ValueError("ours")


def test_after_its_end_nothing_is_asked_of_it(recorder: Recorder, tmp_path: Path) -> None:
    tracker = BackgroundTracker("mlflow", recorder, lambda note: None)
    tracker.start(tmp_path, {}, None)
    tracker.close(ok=True)
    tracker.close(ok=True)
    tracker.log(1, {})
    assert recorder.calls == [("start", None), ("close", True)]
