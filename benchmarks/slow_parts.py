"""Parts of pipelines that sleep: what `why` has to find, whatever else the machine does."""

from __future__ import annotations

import itertools
import threading
import time
from typing import ClassVar

import dagrl


@dagrl.reward(batched=True)
def slow_reward(response: list[str], seconds: float = 0.8) -> list[float]:
    """Score a shard in so many seconds, every other response with 1."""
    time.sleep(seconds)
    return [float(place % 2) for place in range(len(response))]


class SlowGame:
    """An environment of one turn. One prompt of `every` waits `straggler_s` for it, the others `seconds`."""

    _lock: ClassVar = threading.Lock()
    _seen: ClassVar[dict[str, int]] = {}
    _numbers: ClassVar = itertools.count()

    def __init__(self, seconds: float = 0.1, straggler_s: float = 1.5, every: int = 16) -> None:
        self._seconds, self._straggler_s, self._every = seconds, straggler_s, every
        self._waits = seconds

    def reset(self, prompt: str) -> None:
        """Begin a response; those to a prompt straggle together."""
        with self._lock:
            if prompt not in self._seen:
                self._seen[prompt] = next(self._numbers)
            number = self._seen[prompt]
        self._waits = self._straggler_s if number % self._every == self._every // 2 else self._seconds

    def step(self, response: str) -> dagrl.Observation:
        """Answer late, with the end of the response."""
        time.sleep(self._waits)
        return dagrl.Observation(reward=float(len(response) % 2), done=True)
