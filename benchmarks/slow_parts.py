"""Parts of pipelines that sleep, for `why` to find on a machine with any load."""

from __future__ import annotations

import itertools
import time
from typing import ClassVar

import dagrl


@dagrl.reward(batched=True)
def slow_reward(response: list[str], seconds: float = 0.8) -> list[float]:
    """Score a shard in so many seconds, every other response with 1."""
    time.sleep(seconds)
    return [float(place % 2) for place in range(len(response))]


class SlowGame:
    """An environment of one turn. One response of `every` waits `straggler_s` for it, the others `seconds`."""

    _numbers: ClassVar = itertools.count()

    def __init__(self, seconds: float = 0.1, straggler_s: float = 1.5, every: int = 64) -> None:
        self._straggles = next(self._numbers) % every == every // 2
        self._seconds = straggler_s if self._straggles else seconds

    def reset(self, answer: str) -> None:
        """Begin a response."""
        self._answer = answer

    def step(self, response: str) -> dagrl.Observation:
        """Answer late, with the end of the response."""
        time.sleep(self._seconds)
        return dagrl.Observation(reward=float(response == self._answer), done=True)
