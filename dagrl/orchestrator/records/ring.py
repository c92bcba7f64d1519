"""Decides which steps stay recorded: a ring of segments, and segments with alarms."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median

from dagrl.data.stats import Stat

_SPIKE = 5.0
"""A gradient norm above this multiple of the median of its history is a spike."""
_HISTORY, _LEAST_HISTORY = 20, 5


class Ring:
    """Segments of `keep_last` steps, which are replayed from the state before their first step.

    Two segments are kept, so that the last `keep_last` steps can be replayed at any time.
    """

    def __init__(self, keep_last: int, earlier: Iterable[int] = (), kept: Iterable[int] = ()) -> None:
        """`earlier`: first steps of the segments of the run's previous start; `kept`: first steps of segments that are
        kept for good.
        """
        self._length = keep_last
        self._firsts = sorted(earlier)
        self._kept = set(kept)
        self._has_begun = False

    @property
    def kept(self) -> list[int]:
        return sorted(self._kept)

    def begin(self, step: int) -> bool:
        """Called when a step begins or continues. Returns whether it is its segment's first, which needs a state."""
        if not self._has_begun or step >= self._firsts[-1] + self._length:
            self._has_begun = True
            if step not in self._firsts:
                self._firsts.append(step)
        return step in self._firsts

    def commit(self, step: int, *, remarkable: bool) -> list[range]:
        """Called when a step has ended. Returns the segments that are no longer needed, as ranges of steps."""
        if remarkable:
            # Includes the previous segment, because `step` may be the first step of the current one.
            self._kept.update(self._firsts[-2:])
        dropped = []
        # The third segment replaces the first one when its first step is done.
        while len(self._firsts) > 2 and self._firsts[2] <= step:
            first = self._firsts.pop(0)
            if first not in self._kept:
                dropped.append(range(first, self._firsts[0]))
        return dropped


class AlarmDetector:
    """Finds updates whose metrics are not finite, or whose gradient norm is far above the median."""

    def __init__(self, events: Iterable[str]) -> None:
        self._events = frozenset(events)
        self._norms: dict[str, deque[float]] = {}

    def look(self, node: str, metrics: Mapping[str, Stat]) -> str | None:
        """Describe a NaN, an infinity or a spike in the metrics of an update; None if there is none."""
        alarm = None
        for name, stat in metrics.items():
            # A metric without values has no mean.
            if stat.count and not math.isfinite(stat.mean) and "nonfinite" in self._events:
                alarm = alarm or f"{name} of {node} is {stat.mean}"
        norm = next((stat for name, stat in metrics.items() if name.rpartition("/")[2] == "grad_norm"), None)
        if norm is None or not norm.count or not math.isfinite(norm.high):
            return alarm
        history = self._norms.setdefault(node, deque(maxlen=_HISTORY))
        usual = median(history) if len(history) >= _LEAST_HISTORY else math.inf
        if norm.high > _SPIKE * usual and "spike" in self._events:
            alarm = alarm or f"grad_norm of {node} is {norm.high:.3g}, and its median was {usual:.3g}"
        history.append(norm.mean)
        return alarm
