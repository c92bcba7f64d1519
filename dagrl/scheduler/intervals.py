"""Time spans, planned or measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Interval(NamedTuple):
    """From `start` to `end`, in seconds."""

    start: float
    end: float


class _Span(Protocol):
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


def busy_seconds(spans: Iterable[_Span]) -> float:
    """Length of the time that at least one of the spans covers."""
    total, covered = 0.0, float("-inf")
    for span in sorted(spans, key=lambda each: each.start):
        total += max(0.0, span.end - max(span.start, covered))
        covered = max(covered, span.end)
    return total
