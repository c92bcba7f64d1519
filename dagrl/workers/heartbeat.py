"""Signs of life of a worker that generates: one for all that it has under way, while its engine gets on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dagrl.workers.messages import Beat

INTERVAL_S = 1.0


class Pulse:
    """Says when it is time to tell how far the engine is. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = 0
        self._due = 0.0

    def beat(self, sampled_tokens: Callable[[], int], *, last: bool = False) -> Beat | None:
        """What to tell: nothing where that is no news, or was told a moment ago, unless it is the `last` word.

        `sampled_tokens` is asked only where it is time: an engine adds up all that is under way to answer.
        """
        now = time.monotonic()
        with self._lock:
            if now < self._due and not last:
                return None
            sampled = sampled_tokens()
            if sampled == self._told:
                return None
            self._told, self._due = sampled, now + INTERVAL_S
        return Beat(sampled)
