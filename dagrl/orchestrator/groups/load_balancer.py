"""Balances the prompts of a rollout over servers: the next chunk of whole groups goes to the least loaded one. Pure.

A group stays on one server, whose cache holds its prompt once. Chunks do not depend on the servers' speed, so the
batches that are decoded together do not, either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from dagrl.backends.base import RequestLimits

MAX_OPEN_CHUNKS = 16
"""Chunks of any size that a server has in flight. Each takes a thread of its worker."""
_MIN_GATHER_S, _MAX_GATHER_S = 0.05, 1.0
_MESSAGES_PER_S = 200
"""Target for all servers together: the driver takes about a millisecond for each message."""


def agent_limits(running: int, engine: RequestLimits) -> RequestLimits:
    """The limits of agents, which occupy the engine only while they wait for a reply.

    `running` is the number of rows whose agents may run at a time. A quarter more wait at the worker, so that an agent
    that ends is replaced at once.
    """
    # Few chunks, as each takes a thread.
    chunk = min(running, max(engine.chunk, -(-running // (MAX_OPEN_CHUNKS // 2))))
    return RequestLimits(chunk, running + -(-running // 4))


def chunk_limits(limits: RequestLimits, groups: int, group_size: int, servers: int) -> RequestLimits:
    """The limits in whole groups: at least one, and no more than a server's even share of `groups`."""
    even = -(-groups // servers)
    chunk = max(1, min(limits.chunk // group_size, even))
    return RequestLimits(chunk, max(chunk, limits.max_inflight // group_size))


def gather_seconds(servers: int) -> float:
    """Seconds that finished responses of a server wait for others, because messages cost more than their contents.

    The last responses of a chunk do not wait, so only shards before the last ones can be delayed.
    """
    return min(max(_MIN_GATHER_S, servers / _MESSAGES_PER_S), _MAX_GATHER_S)


class LoadBalancer:
    """Assigns groups to servers."""

    def __init__(
        self, groups: Sequence[int], servers: int, limits: RequestLimits, pinned: Mapping[int, int] | None = None
    ) -> None:
        """`pinned`: group -> the only server that may get it."""
        pinned = pinned or {}
        self._chunks = _chunks([group for group in groups if group not in pinned], limits.chunk)
        self._pinned = [
            _chunks([group for group in groups if pinned.get(group) == server], limits.chunk)
            for server in range(servers)
        ]
        """Chunks of each server that no other may get; they come first."""
        self._max_inflight = limits.max_inflight
        self._inflight = [0] * servers
        """Unfinished groups of each server."""
        self._open = [0] * servers
        """Chunks of each server that have not ended."""
        self._starting = [False] * servers
        """Whether a server has not started its newest chunk. It gets no further chunk before, which keeps the order."""

    def next_chunks(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Chunks to send now, as (server, groups)."""
        for server, chunks in enumerate(self._pinned):
            if chunks and self._has_room(server, len(chunks[0])):
                yield server, self._send(server, chunks)
        while self._chunks:
            groups = self._chunks[0]
            free = [server for server in range(len(self._inflight)) if self._has_room(server, len(groups))]
            if not free:
                return
            server = min(free, key=self._inflight.__getitem__)
            yield server, self._send(server, self._chunks)

    def started(self, server: int) -> None:
        self._starting[server] = False

    def finished(self, server: int, groups: int) -> None:
        self._inflight[server] -= groups
        assert self._inflight[server] >= 0, f"server {server} has finished more groups than it got"

    def end_chunk(self, server: int, unfinished: int) -> None:
        self._open[server] -= 1
        self.started(server)
        self.finished(server, unfinished)

    def stop(self) -> None:
        for chunks in (self._chunks, *self._pinned):
            chunks.clear()

    def _send(self, server: int, chunks: deque[tuple[int, ...]]) -> tuple[int, ...]:
        groups = chunks.popleft()
        self._inflight[server] += len(groups)
        self._open[server] += 1
        self._starting[server] = True
        return groups

    def _has_room(self, server: int, groups: int) -> bool:
        if self._starting[server] or self._open[server] == MAX_OPEN_CHUNKS:
            return False
        return self._inflight[server] == 0 or self._inflight[server] + groups <= self._max_inflight


def _chunks(groups: Sequence[int], size: int) -> deque[tuple[int, ...]]:
    return deque(tuple(groups[begin : begin + size]) for begin in range(0, len(groups), size))
