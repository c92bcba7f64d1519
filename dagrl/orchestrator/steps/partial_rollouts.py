"""The partial-rollout buffer: prompts that a step has not finished. They come first in a later step. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, repeat

from dagrl.ops.work import Begun, PausedGroup


@dataclass(slots=True)
class _Prompt:
    position: int
    left_by: int
    """The step that has not finished it."""
    begun: Begun | None = None
    sampled: tuple[int, ...] = ()
    """Tokens of each of its samples; -1: none."""
    taken_by: int | None = None


class PartialRolloutBuffer:
    """Unfinished prompts, oldest first.

    Steps may overlap: a later step may have taken prompts that the checkpoint of an earlier one must hold.
    """

    def __init__(self, positions: Iterable[int] = (), sampled: Iterable[tuple[int, ...]] = ()) -> None:
        """`positions` in the data set of a checkpoint's prompts. Their tokens, `sampled` of each, are lost."""
        tokens = chain(sampled, repeat(()))
        self._prompts = [_Prompt(position, left_by=0, sampled=next(tokens)) for position in positions]

    def take(self, step: int, most: int) -> tuple[int, ...]:
        """Data set positions of the prompts with which `step` begins."""
        waiting = [prompt for prompt in self._prompts if prompt.taken_by is None][:most]
        for prompt in waiting:
            prompt.taken_by = step
        return tuple(prompt.position for prompt in waiting)

    def begun(self, step: int) -> dict[int, Begun]:
        """Data set position -> what exists, of the prompts that `step` has taken."""
        mine = [prompt for prompt in self._prompts if prompt.taken_by == step]
        return {prompt.position: prompt.begun for prompt in mine if prompt.begun is not None}

    def sampled(self, step: int) -> dict[int, tuple[int, ...]]:
        """Data set position -> tokens of each sample, of the prompts that `step` has taken."""
        return {prompt.position: prompt.sampled for prompt in self._prompts if prompt.taken_by == step}

    def drop_tokens(self) -> None:
        """The objects with the tokens may be lost: all prompts start again, except those of agents that go on."""
        for prompt in self._prompts:
            if not isinstance(prompt.begun, PausedGroup):
                prompt.begun = None

    def add(self, step: int, prompts: Iterable[tuple[int, Begun | None, tuple[int, ...]]]) -> None:
        """Add what `step` has not finished: data set positions, partial rollouts and tokens of each sample."""
        self._prompts += [_Prompt(position, step, begun, sampled) for position, begun, sampled in prompts]

    def after(self, step: int) -> tuple[int, ...]:
        """Data set positions of the prompts that are unfinished after `step`."""
        return tuple(prompt.position for prompt in self._after(step))

    def sampled_after(self, step: int) -> tuple[tuple[int, ...], ...]:
        """Tokens of each sample of these prompts."""
        return tuple(prompt.sampled for prompt in self._after(step))

    def _after(self, step: int) -> list[_Prompt]:
        return [
            prompt
            for prompt in self._prompts
            if prompt.left_by <= step and (prompt.taken_by is None or prompt.taken_by > step)
        ]

    def commit(self, step: int) -> None:
        """Drop the prompts that `step` and earlier steps have taken."""
        self._prompts = [prompt for prompt in self._prompts if prompt.taken_by is None or prompt.taken_by > step]
