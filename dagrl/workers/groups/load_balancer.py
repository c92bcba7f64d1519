"""Deals the prompts of a rollout to servers by load: whole groups, the next portion to whoever has least in hand. Pure.

A prompt's group stays on one server, whose cache holds the prompt once. Portions are cut the same whoever gets them, so
that what is decoded together does not depend on who was faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dagrl.backends.base import Appetite

MOST_PORTIONS = 16
"""Portions that a server has at once, whatever their size: each takes a thread of its worker."""
_LEAST_GATHER_S, _MOST_GATHER_S = 0.05, 1.0
_MESSAGES_PER_S = 200
"""From all servers together: the driver takes about a millisecond for each."""


@dataclass(frozen=True, slots=True)
class Helping:
    """How much is dealt at a time."""

    portion: int
    """Groups that are handed over together."""
    at_once: int
    """Groups that a server has in hand before it has to finish some."""


def helping(appetite: Appetite, groups: int, group_size: int, servers: int) -> Helping:
    """What servers of this appetite get of `groups` groups: never less than one, or more than a server's even share."""
    even = -(-groups // servers)
    portion = max(1, min(appetite.portion // group_size, even))
    return Helping(portion, max(portion, appetite.at_once // group_size))


def gathering_s(servers: int) -> float:
    """How long what a server has finished waits for more, as a message costs more than what is in it, in seconds.

    A portion's last responses never wait, so that nothing but the shards before the last ones can come later for it.
    """
    return min(max(_LEAST_GATHER_S, servers / _MESSAGES_PER_S), _MOST_GATHER_S)


class Dealer:
    """Who gets which groups next."""

    def __init__(self, groups: Sequence[int], servers: int, size: Helping) -> None:
        ends = range(size.portion, len(groups) + size.portion, size.portion)
        self._portions = deque(tuple(groups[end - size.portion : end]) for end in ends)
        self._at_once = size.at_once
        self._in_hand = [0] * servers
        """Groups that each server has and has not finished."""
        self._open = [0] * servers
        """Portions of which each server has groups in hand, or of which it has not said that they are over."""
        self._handing = [False] * servers
        """Whether a server has not begun yet with what it was dealt last: it gets the next when it has, to keep the
        order."""

    def deal(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Portions to be handed over now, as (server, groups)."""
        while self._portions:
            groups = self._portions[0]
            takers = [server for server in range(len(self._in_hand)) if self._takes(server, len(groups))]
            if not takers:
                return
            server = min(takers, key=self._in_hand.__getitem__)
            self._portions.popleft()
            self._in_hand[server] += len(groups)
            self._open[server] += 1
            self._handing[server] = True
            yield server, groups

    def begun(self, server: int) -> None:
        """A server has begun with what it was dealt last."""
        self._handing[server] = False

    def finished(self, server: int, groups: int) -> None:
        """A server has finished so many groups."""
        self._in_hand[server] -= groups
        assert self._in_hand[server] >= 0, f"server {server} has finished more than it was dealt"

    def over(self, server: int, unfinished: int) -> None:
        """A server is through with a portion, so many groups of which will not be finished."""
        self._open[server] -= 1
        self.begun(server)
        self.finished(server, unfinished)

    def stop(self) -> None:
        """Deal no more."""
        self._portions.clear()

    def _takes(self, server: int, groups: int) -> bool:
        if self._handing[server] or self._open[server] == MOST_PORTIONS:
            return False
        return self._in_hand[server] == 0 or self._in_hand[server] + groups <= self._at_once
