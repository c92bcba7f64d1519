"""Names the time in which a group of workers does nothing after what it waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dagrl.scheduler.intervals import Activity, Interval

DRIVER = "driver"
"""The cause of a pause in which no worker runs: the driver schedules, commits a step or starts."""
_SHORTEST_S = 1e-3
_TOLERANCE_S = 2e-3
"""Clocks of workers and driver differ by less than this."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A pause of a group, in seconds since the epoch."""

    group: str
    start: float
    end: float
    cause: str
    """``NODE (EXECUTOR)`` of what runs elsewhere, or `DRIVER`."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


def idle_times(group: str, spans: Sequence[Activity], window: Interval) -> list[Idle]:
    """The pauses of a group in a window, in order, each named after one cause; pauses below 1 ms are left out.

    `spans` are the activities of all groups that overlap with the window. A group waits for the activity elsewhere
    that ends last before it goes on. A part of a pause in which that has not begun is named after what runs then.
    """
    own = [span for span in spans if span.group == group]
    others = [span for span in spans if span.group != group]
    idle: list[Idle] = []
    for pause in gaps(own, window):
        during = [span for span in others if span.start < pause.end and span.end > pause.start]
        borders = {pause.start, pause.end}
        borders |= {at for span in during for at in (span.start, span.end) if pause.start < at < pause.end}
        edges = sorted(borders)
        for start, end in pairwise(edges):
            cause = _cause(during, start, end, pause.end)
            if idle and idle[-1].cause == cause and idle[-1].end == start:
                idle[-1] = Idle(group, idle[-1].start, end, cause)
            else:
                idle.append(Idle(group, start, end, cause))
    return [pause for pause in idle if pause.seconds >= _SHORTEST_S]


def gaps(spans: Iterable[Activity], window: Interval) -> list[Interval]:
    """The parts of a window that no span covers, in order."""
    pauses, covered = [], window.start
    for span in sorted(spans, key=lambda each: each.start):
        if span.start > covered:
            pauses.append(Interval(covered, min(span.start, window.end)))
        covered = max(covered, span.end)
    if covered < window.end:
        pauses.append(Interval(covered, window.end))
    return [gap for gap in pauses if gap.end > gap.start]


def _cause(during: Sequence[Activity], start: float, end: float, resumed: float) -> str:
    """The activity, of those under way from `start` to `end`, that the group waits for until it has `resumed`."""
    active = [span for span in during if span.start <= start and span.end >= end]
    if not active:
        return DRIVER
    before = [span for span in active if span.end <= resumed + _TOLERANCE_S]
    cause = max(before or active, key=lambda span: span.end)
    return f"{cause.name} ({cause.executor})"
