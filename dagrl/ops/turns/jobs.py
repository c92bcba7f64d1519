"""Runs tools and environments in threads, each with a time limit."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class JobTimeoutError(TimeoutError):
    """A job exceeded its time limit."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job's result or failure."""

    job: int
    result: Any = None
    failure: BaseException | None = None
    """The exception of the work; a JobTimeoutError if it exceeded its time limit."""


class Jobs:
    """Runs up to `max_running` jobs at a time, each for at most `timeout_s`. Not thread-safe.

    Python cannot stop a thread: a job that exceeds its limit keeps running, but frees its slot.
    """

    def __init__(self, deliver: Callable[[JobResult], None], *, max_running: int, timeout_s: float) -> None:
        """`deliver` receives ended jobs, from any thread; pass them to `settle`."""
        self._deliver = deliver
        self._max_running = max_running
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()
        self._running: dict[int, float] = {}
        """Job -> deadline."""
        self._number = 0

    def begin(self, work: Callable[[], Any]) -> int:
        """Run `work` as soon as a slot is free; returns the job's number."""
        self._number += 1
        self._waiting.append((self._number, work))
        self._start()
        return self._number

    def settle(self, result: JobResult) -> bool:
        """Free the job's slot; returns False if the job had exceeded its time limit before."""
        in_time = self._running.pop(result.job, None) is not None
        self._start()
        return in_time

    def left_s(self) -> float | None:
        return max(0.0, min(self._running.values()) - time.monotonic()) if self._running else None

    def late(self) -> list[JobResult]:
        """Jobs past their deadline, as failures to be settled."""
        now = time.monotonic()
        message = f"no answer within {self._timeout_s:g} s"
        return [
            JobResult(job, failure=JobTimeoutError(message)) for job, until in self._running.items() if until <= now
        ]

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            job, work = self._waiting.popleft()
            self._running[job] = time.monotonic() + self._timeout_s
            # Daemon threads, so that a hanging job does not keep the process alive.
            threading.Thread(target=self._run, args=(job, work), daemon=True).start()

    def _run(self, job: int, work: Callable[[], Any]) -> None:
        try:
            done = JobResult(job, work())
        except BaseException as failure:  # noqa: BLE001 - the work is a user's; its failure is delivered
            done = JobResult(job, failure=failure)
        self._deliver(done)
