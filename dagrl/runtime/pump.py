"""Runs an iterator in a thread of its own, so that whoever wants its items can do something else meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable


class Pump[Item]:
    """Collects the items of an iterator as they come."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._came: queue.SimpleQueue[Item | _End] = queue.SimpleQueue()
        self._end: _End | None = None
        # A daemon: whoever no longer wants the items, because the run is over, does not wait for their end.
        threading.Thread(target=self._pump, args=(items,), daemon=True).start()

    def take(self, timeout_s: float) -> list[Item] | None:
        """All that has come since the last call, nothing where that is so for `timeout_s`; None after the last item.

        Raises what the iterator has raised, once everything before it was taken.
        """
        if self._end is not None:
            if self._end.failure is not None:
                raise self._end.failure
            return None
        taken: list[Item] = []
        try:
            item = self._came.get(timeout=timeout_s)
            while not isinstance(item, _End):
                taken.append(item)
                item = self._came.get_nowait()
            self._end = item
        except queue.Empty:
            return taken
        return taken or self.take(timeout_s)

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
