"""Runs an iterator in a thread of its own, so that whoever wants its items can do something else meanwhile."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable


class Pump[Item]:
    """Collects the items of an iterator as they come."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._came: queue.SimpleQueue[Item | _End] = queue.SimpleQueue()
        self._end: _End | None = None
        # A daemon: whoever no longer wants the items, because the run is over, does not wait for their end.
        threading.Thread(target=self._pump, args=(items,), daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the last item was taken, and nothing is to be raised."""
        return self._end is not None and self._end.failure is None

    def take(self, timeout_s: float, gather_s: float = 0.0) -> list[Item] | None:
        """What comes next, with all that comes within `gather_s` behind it; None after the last item.

        Nothing where nothing comes for `timeout_s`. Raises what the iterator has raised, once everything before it was
        taken.
        """
        taken: list[Item] = []
        until = time.monotonic() + timeout_s
        while self._end is None:
            try:
                item = self._came.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return taken
            if isinstance(item, _End):
                self._end = item
                break
            if not taken:
                until = time.monotonic() + gather_s
            taken.append(item)
            if time.monotonic() > until:
                return taken
        if not taken and self._end.failure is not None:
            raise self._end.failure
        return taken or None

    def _pump(self, items: Iterable[Item]) -> None:
        end = _End(None)
        try:
            for item in items:
                self._came.put(item)
        except BaseException as failure:  # noqa: BLE001 - handed to the taker's thread, which raises it
            end = _End(failure)
        self._came.put(end)


class _End:
    """What comes after the last item."""

    def __init__(self, failure: BaseException | None) -> None:
        self.failure = failure
