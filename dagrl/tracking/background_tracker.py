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

from dagrl.tracking.base import SampleTable, SampleTracker

FINISH_TIMEOUT_S = 120.0
"""Longest wait for a guest at the end of the run."""
QUIET_S = 5.0
"""Of that wait, before anything is said of it."""
LONGEST_QUEUE = 1000
"""Calls that may wait for a guest: behind that, it is given up."""


class TrackerFailedError(Exception):
    """A library, the network or the disk failed it; the text is the first line of what it said."""


@contextmanager
def failures_of(library: str) -> Iterator[None]:
    """Make whatever a library raises one kind of error, with its cause. Any other error is a bug of ours, and passes.

    Such libraries raise classes without a common base, Python's own among them: they are told by where they come from.
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
    """An id that is made once and kept in the file `path`, so that a run that goes on stays one run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or not path.read_text().strip():
        path.write_text(secrets.token_hex(4) + "\n")
    return path.read_text().strip()


class BackgroundTracker:
    """A tracker in a thread of its own. What it is told is done in order, later."""

    def __init__(self, library: str, tracker: SampleTracker, note: Callable[[str], None]) -> None:
        """`library` is the package that may fail; `note` tells the user something, from any thread."""
        self._library, self._tracker, self._note = library, tracker, note
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(LONGEST_QUEUE)
        self._thread = threading.Thread(target=self._serve, name=f"track {library}", daemon=True)
        self._over = False
        """Whether nothing more is asked of it."""
        self._bug: Exception | None = None

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_step: int | None) -> None:
        """Begin, in the background."""
        self._thread.start()
        self._ask(partial(self._tracker.start, run_dir, config, resumed_step))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Have a step's metrics recorded."""
        self._ask(partial(self._tracker.log, step, dict(metrics)))

    def samples(self, step: int, table: SampleTable) -> None:
        """Have a table shown."""
        self._ask(partial(self._tracker.samples, step, table))

    def close(self, ok: bool) -> None:
        """Wait until all is recorded, but not for ever, and not for longer than the user does."""
        if self._thread.ident is None:
            return
        if not self._over:
            self._ask(partial(self._tracker.close, ok))
            self._end()
        begun = time.monotonic()
        # The run is over by now: Ctrl-C ends this wait, and nothing else.
        with suppress(KeyboardInterrupt):
            self._thread.join(min(QUIET_S, FINISH_TIMEOUT_S))
            if self._thread.is_alive():
                self._note(f"waiting for {self._library} to take what it has been told, {FINISH_TIMEOUT_S:g} s at most")
                self._thread.join(max(0.0, FINISH_TIMEOUT_S - QUIET_S))
        if self._thread.is_alive():
            waited = time.monotonic() - begun
            self._note(f"{self._library} was still busy after {waited:.3g} s; metrics.jsonl has every step")
        self._raise_bug()

    def _ask(self, call: Callable[[], None]) -> None:
        self._raise_bug()
        if self._over:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._note(f"{self._library} is {LONGEST_QUEUE} steps behind and is given up; metrics.jsonl has every step")
            with suppress(queue.Empty):
                while True:
                    self._calls.get_nowait()
            self._calls.put_nowait(partial(self._tracker.close, ok=False))
            self._end()

    def _end(self) -> None:
        """Let the thread end after what it has been asked for."""
        self._over = True
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
            self._over = True
            self._note(f"{self._library} stopped: {error}; metrics.jsonl has every step")
            with suppress(TrackerFailedError), failures_of(self._library):
                self._tracker.close(ok=False)
        except Exception as error:  # noqa: BLE001 - a bug of ours: raised where the run can hear of it
            self._over, self._bug = True, error
