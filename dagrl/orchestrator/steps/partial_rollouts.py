"""The partial-rollout buffer: prompts that a step has not finished. They come first in a later step. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dagrl.ops.work import Carried, PausedGroup


@dataclass(slots=True)
class _Prompt:
    carried: Carried
    left_by: int
    """The step that has not finished it."""
    taken_by: int | None = None
    taken_in: int = 0
    """The round of that step."""


class PartialRolloutBuffer:
    """Unfinished prompts, oldest first.

    Steps may overlap: a later step may have taken prompts that the checkpoint of an earlier one must hold.
    """

    def __init__(self, carried: Iterable[Carried] = ()) -> None:
        """The prompts of a checkpoint, whose tokens are lost."""
        self._prompts = [_Prompt(each, left_by=0) for each in carried]

    def take(self, step: int, most: int, round_: int = 0) -> tuple[int, ...]:
        """Ids of the prompts with which a round of `step` begins."""
        waiting = [prompt for prompt in self._prompts if prompt.taken_by is None][:most]
        for prompt in waiting:
            prompt.taken_by, prompt.taken_in = step, round_
        return tuple(prompt.carried.prompt for prompt in waiting)

    def taken(self, step: int, round_: int = 0) -> list[Carried]:
        """The prompts that a round of `step` has taken, in order."""
        return [each.carried for each in self._prompts if (each.taken_by, each.taken_in) == (step, round_)]

    def drop_tokens(self) -> None:
        """The objects with the tokens may be lost: all prompts start again, except those of agents that go on."""
        for prompt in self._prompts:
            if not isinstance(prompt.carried.begun, PausedGroup):
                prompt.carried = prompt.carried._replace(begun=None)

    def add(self, step: int, prompts: Iterable[Carried]) -> None:
        """Add what `step` has not finished."""
        self._prompts += [_Prompt(each, step) for each in prompts]

    def after(self, step: int) -> list[Carried]:
        """The prompts that are unfinished after `step`."""
        return [
            prompt.carried
            for prompt in self._prompts
            if prompt.left_by <= step and (prompt.taken_by is None or prompt.taken_by > step)
        ]

    def commit(self, step: int) -> None:
        """Drop the prompts that `step` and earlier steps have taken."""
        self._prompts = [prompt for prompt in self._prompts if prompt.taken_by is None or prompt.taken_by > step]
