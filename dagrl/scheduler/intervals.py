"""Stretches of time in which something runs, planned or measured, and how much of the time they cover."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Spans(Protocol):
    """Something with a begin and an end, in seconds."""

    @property
    def start(self) -> float:
        """When it begins."""
        ...

    @property
    def end(self) -> float:
        """When it is over."""
        ...


class Interval(NamedTuple):
    """From `start` to `end`, seconds."""

    start: float
    end: float


def busy_seconds(spans: Iterable[Spans]) -> float:
    """Length of the time in which at least one of the spans runs."""
    total, covered = 0.0, float("-inf")
    for span in sorted(spans, key=lambda each: each.start):
        total += max(0.0, span.end - max(span.start, covered))
        covered = max(covered, span.end)
    return total
