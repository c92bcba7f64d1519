"""Responses of several turns that a step has not finished, for a later one: in memory, with what answers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dagrl.ops.response import Response
from dagrl.ops.turns.dialogue import ResponseDialogue

type GroupKey = tuple[int, int]
"""A step, and a group of it."""


@dataclass(frozen=True, slots=True)
class PausedResponse:
    """A response, possibly finished, and its tools and environment."""

    response: Response
    dialogue: ResponseDialogue


class PausedResponses:
    """The responses of groups that a step has not finished. Thread-safe."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, list[PausedResponse]] = {}

    def put(self, key: GroupKey, responses: Sequence[PausedResponse]) -> None:
        """Keep the responses of a group, in the order of its samples."""
        self._groups[key] = [*responses]

    def take(self, key: GroupKey | None) -> list[PausedResponse]:
        """The responses of a group; empty if there are none, as after the end of a worker."""
        return self._groups.pop(key, []) if key is not None else []

    def leave_before(self, step: int) -> None:
        """Release the environments of those that steps before `step` have left."""
        for key in [key for key in tuple(self._groups) if key[0] < step]:
            for paused in self.take(key):
                paused.dialogue.leave()
