"""Helpers of a worker that streams: a background iterator, heartbeats, and the gate for new weights. Thread-safe."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable

from dagrl.workers.messages import Heartbeat

HEARTBEAT_S = 1.0


class BackgroundIterator[Item]:
    """Consumes an iterator in a daemon thread."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._queue: queue.SimpleQueue[Item | _End] = queue.SimpleQueue()
        self._end: _End | None = None
        threading.Thread(target=self._consume, args=(items,), daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the last item was taken, and the iterator has not failed."""
        return self._end is not None and self._end.failure is None

    def take(self, timeout_s: float, gather_s: float = 0.0) -> list[Item] | None:
        """The next item and further ones within `gather_s`; None after the last item.

        Returns an empty list after `timeout_s`. Raises the iterator's exception once all items before it were taken.
        """
        taken: list[Item] = []
        until = time.monotonic() + timeout_s
        while self._end is None:
            try:
                item = self._queue.get(timeout=max(0.0, until - time.monotonic()))
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

    def _consume(self, items: Iterable[Item]) -> None:
        end = _End(None)
        try:
            for item in items:
                self._queue.put(item)
        except BaseException as failure:  # noqa: BLE001 - raised again by `take`
            end = _End(failure)
        self._queue.put(end)


class _End:
    """Follows the last item."""

    def __init__(self, failure: BaseException | None) -> None:
        self.failure = failure


class HeartbeatLimiter:
    """Rate-limits heartbeats: one for all chunks that are in flight, and only if the engine advances."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reported = 0
        self._due = 0.0

    def next(self, sampled_tokens: Callable[[], int], *, last: bool = False) -> Heartbeat | None:
        """The heartbeat to send now, if any. The `last` one of a chunk is not limited.

        `sampled_tokens` is called only if one is due: it is expensive for an engine with many requests in flight.
        """
        now = time.monotonic()
        with self._lock:
            if now < self._due and not last:
                return None
            sampled = sampled_tokens()
            if sampled == self._reported:
                return None
            self._reported, self._due = sampled, now + HEARTBEAT_S
        return Heartbeat(sampled)


class WeightVersionGate:
    """Blocks work queued behind a weight sync until the weights arrive."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._newest = 0

    def open(self, sync: int) -> None:
        """The weights of a sync have arrived. Numbers of syncs ascend."""
        with self._changed:
            self._newest = sync
            self._changed.notify_all()

    def recheck(self) -> None:
        """Make waiting threads evaluate their `unless` again."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, sync: int, timeout_s: float, *, unless: Callable[[], bool]) -> bool:
        """Wait for the weights of `sync` or newer ones, or for `unless`. False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._newest >= sync or unless(), timeout_s)
