"""Which weights have come to a generator: what was sent to it behind their sync waits for that."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Arrivals:
    """Those of one worker. From any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._newest = 0

    def arrived(self, sync: int) -> None:
        """The weights of a sync are there, by its number; each has a larger one than those before."""
        with self._changed:
            self._newest = sync
            self._changed.notify_all()

    def look_again(self) -> None:
        """Whoever waits may have no reason to any more."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, sync: int, seconds: float, *, unless: Callable[[], bool]) -> bool:
        """Whether there is nothing to wait for any more: the weights of `sync` or newer ones are there, or `unless`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._newest >= sync or unless(), seconds)
