"""Time spans and the activities of workers, planned or measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from dagrl.scheduler.plan import WorkerId


class Interval(NamedTuple):
    """From `start` to `end`, in seconds."""

    start: float
    end: float


class Activity(NamedTuple):
    """A bar of the timeline: an activity of a worker from `start` to `end`.

    Times are in seconds, since the epoch in a run, and since the start of the first step in a simulation.
    """

    name: str
    """The task, or ``sync``, ``sleep``, ``wake``, ``restart``, ``save``, ``write``."""
    category: str
    """The op, or the name."""
    start: float
    end: float
    """In a simulation, each shard of a streaming run starts at the end of the previous one."""
    step: int
    shard: int | None
    """None: the whole batch, or no rows."""
    group: str
    """``host`` for tasks without an engine."""
    worker: WorkerId
    """The receiver of a sync; the first worker where several run."""

    @property
    def executor(self) -> str:
        return self.worker.executor


class _Span(Protocol):
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


def busy_seconds(spans: Iterable[_Span]) -> float:
    """Total time that is covered by at least one span."""
    total, covered = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, covered))
        covered = max(covered, span.end)
    return total
