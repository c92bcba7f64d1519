"""Groups that a step has not finished, kept in the worker's memory for a later step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

type GroupKey = tuple[int, int]
"""A step, and a group of it."""


class PausedGroups[Kept]:
    """For each unfinished group what continues its samples."""

    def __init__(self, release: Callable[[Kept], None]) -> None:
        """`release` ends what no later step continues."""
        self._groups: dict[GroupKey, list[Kept]] = {}
        self._release = release

    def put(self, key: GroupKey, kept: Sequence[Kept]) -> None:
        self._groups[key] = [*kept]

    def take(self, key: GroupKey | None) -> list[Kept]:
        """Remove and return a group; empty if there is none, as after the end of a worker."""
        return self._groups.pop(key, []) if key is not None else []

    def release_before(self, step: int) -> None:
        for key in [key for key in tuple(self._groups) if key[0] < step]:
            for kept in self.take(key):
                self._release(kept)

    def all(self) -> list[Kept]:
        return [kept for group in self._groups.values() for kept in group]
