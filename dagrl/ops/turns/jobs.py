"""Work that may take its time, or for ever: tools and environments, each in a thread of its own and bounded in time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class JobTimeoutError(TimeoutError):
    """Work has taken longer than it may."""


@dataclass(frozen=True, slots=True)
class Done:
    """A job's end."""

    job: int
    result: Any = None
    failure: BaseException | None = None
    """What the work raised; a JobTimeoutError where it took too long."""


class Jobs:
    """Runs work, `at_once` at a time, each for `timeout_s` at most. To be used from one thread.

    Python cannot end a thread: work that takes too long goes on, but nobody waits for it, and it takes no one's place.
    """

    def __init__(self, deliver: Callable[[Done], None], *, at_once: int, timeout_s: float) -> None:
        """`deliver` hears of the end of work, from any thread; whether it still matters, `settle` says."""
        self._deliver = deliver
        self._at_once = at_once
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[int, Callable[[], Any]]] = deque()
        self._running: dict[int, float] = {}
        """Job -> when its time is up."""
        self._number = 0

    def begin(self, work: Callable[[], Any]) -> int:
        """Run this as soon as there is room; the job's number."""
        self._number += 1
        self._waiting.append((self._number, work))
        self._start()
        return self._number

    def settle(self, done: Done) -> bool:
        """Make room for the next; whether the job's end is news, and not one that came too late."""
        news = self._running.pop(done.job, None) is not None
        self._start()
        return news

    def left_s(self) -> float | None:
        """Seconds until the next job's time is up; None where nothing runs."""
        return max(0.0, min(self._running.values()) - time.monotonic()) if self._running else None

    def late(self) -> list[Done]:
        """Jobs whose time is up, as their ends, to be settled like others."""
        now = time.monotonic()
        message = f"no answer within {self._timeout_s:g} s"
        return [Done(job, failure=JobTimeoutError(message)) for job, until in self._running.items() if until <= now]

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._at_once:
            job, work = self._waiting.popleft()
            self._running[job] = time.monotonic() + self._timeout_s
            # A daemon: what hangs must not keep the process from ending.
            threading.Thread(target=self._run, args=(job, work), daemon=True).start()

    def _run(self, job: int, work: Callable[[], Any]) -> None:
        try:
            done = Done(job, work())
        except BaseException as failure:  # noqa: BLE001 - the work is a user's; whoever asked for it hears of it
            done = Done(job, failure=failure)
        self._deliver(done)
