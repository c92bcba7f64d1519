"""Runs third-party trackers in background threads, so that a slow or unreachable service does not delay the run.

If a tracker fails, the run continues and prints one note.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from dagrl.plugins.calls import ending_children
from dagrl.plugins.custom import load_function, raised_by
from dagrl.plugins.tracker import check_tracker
from dagrl.tracking.base import SampleTable, SampleTracker

FINISH_TIMEOUT_S = 120.0
"""Longest wait for a tracker at the end of the run."""
QUIET_S = 5.0
"""Part of that wait before a note."""
LONGEST_QUEUE = 1000
"""Longest queue of calls; a tracker with a longer one is dropped."""


class TrackerFailedError(Exception):
    """A tracker's library, network or disk failed; the message is the first line of the cause."""


@contextmanager
def failures_of(library: str) -> Iterator[None]:
    """Turn errors raised by a library into TrackerFailedError. Other errors are bugs in dagrl and pass.

    Such libraries raise classes without a common base, also built-in ones, so errors are recognised by their traceback.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == library:
            raise TrackerFailedError(f"it is not installed; pip install 'dagrl[{library}]'") from error
        if not isinstance(error, OSError) and not _comes_from(error.__traceback__, library):
            raise
        raise TrackerFailedError((str(error) or type(error).__name__).splitlines()[0]) from error


def _comes_from(trace: TracebackType | None, library: str) -> bool:
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == library:
            return True
        trace = trace.tb_next
    return False


def stable_id(path: Path) -> str:
    """An id that is created once and stored in the file `path`, so that a resumed run keeps its identity."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or not path.read_text().strip():
        path.write_text(secrets.token_hex(4) + "\n")
    return path.read_text().strip()


class BackgroundTracker:
    """A tracker in a background thread, which executes calls in order."""

    def __init__(self, library: str, tracker: SampleTracker, note: Callable[[str], None]) -> None:
        """`library` is the package that may fail; `note` prints a message, from any thread."""
        self._library, self._tracker, self._note = library, tracker, note
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(LONGEST_QUEUE)
        self._thread = threading.Thread(target=self._serve, name=f"track {library}", daemon=True)
        self._is_closed = False
        """Whether further calls are ignored."""
        self._bug: Exception | None = None

    def start(self, run_dir: Path, config: Mapping[str, object], resumed_step: int | None) -> None:
        self._thread.start()
        self._ask(partial(self._tracker.start, run_dir, config, resumed_step))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._ask(partial(self._tracker.log, step, dict(metrics)))

    def samples(self, step: int, table: SampleTable) -> None:
        self._ask(partial(self._tracker.samples, step, table))

    def close(self, ok: bool) -> None:
        """Wait until the queue is empty, up to FINISH_TIMEOUT_S or Ctrl-C."""
        if self._thread.ident is None:
            return
        if not self._is_closed:
            self._ask(partial(self._tracker.close, ok))
            self._end()
        begun = time.monotonic()
        # The run has ended: Ctrl-C only ends this wait.
        with suppress(KeyboardInterrupt):
            self._thread.join(min(QUIET_S, FINISH_TIMEOUT_S))
            if self._thread.is_alive():
                self._note(f"waiting for {self._library} to finish, {FINISH_TIMEOUT_S:g} s at most")
                self._thread.join(max(0.0, FINISH_TIMEOUT_S - QUIET_S))
        if self._thread.is_alive():
            waited = time.monotonic() - begun
            self._note(f"{self._library} was still busy after {waited:.3g} s; metrics.jsonl has every step")
        self._raise_bug()

    def _ask(self, call: Callable[[], None]) -> None:
        self._raise_bug()
        if self._is_closed:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._note(f"{self._library} is {LONGEST_QUEUE} steps behind and is dropped; metrics.jsonl has every step")
            with suppress(queue.Empty):
                while True:
                    self._calls.get_nowait()
            self._calls.put_nowait(partial(self._tracker.close, ok=False))
            self._end()

    def _end(self) -> None:
        self._is_closed = True
        with suppress(queue.Full):
            self._calls.put_nowait(None)

    def _raise_bug(self) -> None:
        bug, self._bug = self._bug, None
        if bug is not None:
            raise bug

    def _serve(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                with failures_of(self._library):
                    call()
        except TrackerFailedError as error:
            self._is_closed = True
            self._note(f"{self._library} stopped: {error}; metrics.jsonl has every step")
            with suppress(TrackerFailedError), failures_of(self._library):
                self._tracker.close(ok=False)
        except Exception as error:  # noqa: BLE001 - a bug of ours: raised where the run can hear of it
            self._is_closed, self._bug = True, error


class OwnTracker:
    """Calls a user's tracker; a failure names its line."""

    def __init__(self, place: str, args: Mapping[str, object], folder: Path | None) -> None:
        """Import the class at `place`, for which `folder` is searched, and make an instance.

        Raises ValueError if there is no such class, it is no tracker, or its constructor fails.
        """
        made = load_function(place, folder)
        check_tracker(made, place, args)
        try:
            self._tracker: Any = made(**args)
        except Exception as error:
            raise ValueError(f"the tracker {place} {raised_by(made.__init__, error)}") from error

    def start(self, run_dir: Path, config: Mapping[str, object], resumed_step: int | None) -> None:
        self._call(self._tracker.start, run_dir, config, resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call(self._tracker.log, step, metrics)

    def samples(self, step: int, table: SampleTable) -> None:
        """Show a table, if the tracker has such a method."""
        if (shows := getattr(self._tracker, "samples", None)) is not None:
            self._call(shows, step, table)

    def close(self, ok: bool) -> None:
        self._call(self._tracker.close, ok)

    def _call(self, method: Callable[..., Any], *arguments: Any) -> None:
        try:
            with ending_children(method):
                method(*arguments)
        except Exception as error:
            raise TrackerFailedError(raised_by(method, error)) from error
