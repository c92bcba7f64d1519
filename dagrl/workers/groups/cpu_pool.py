"""The host's workers that have nothing to do, and who of them takes what comes."""

from __future__ import annotations

from collections.abc import Sequence

from dagrl.workers.groups.worker_group import Member


class IdleHosts:
    """They are alike, but that one has read ahead in the data."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._idle = list(members)
        self._reader: Member | None = None

    def take(self, *, reads: bool) -> Member:
        """One of those that are idle, who is busy then. Whoever `reads` prompts is the last reader, where that is idle,
        and takes nothing else while others are.
        """
        fitting = [member for member in self._idle if (member is self._reader) == reads] or self._idle
        self._idle.remove(member := fitting[-1])
        if reads:
            self._reader = member
        return member

    def give_back(self, member: Member) -> None:
        """It is idle again."""
        self._idle.append(member)
