"""Decides which steps stay recorded: a ring of segments, and segments with incidents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from dagrl.data.stats import Stat


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


def nonfinite(node: str, metrics: Mapping[str, Stat]) -> str | None:
    """Describe a NaN or an infinity in the metrics of an update; None if there is none."""
    # A metric without values has no mean.
    wrong = ((name, stat) for name, stat in metrics.items() if stat.count and not math.isfinite(stat.mean))
    return next((f"{name} of {node} is {stat.mean}" for name, stat in wrong), None)
