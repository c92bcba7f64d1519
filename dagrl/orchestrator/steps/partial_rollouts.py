"""Prompts that a step has begun and not finished: they come first in a later one, and checkpoints keep them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dagrl.workers.messages import Begun


@dataclass(slots=True)
class _Prompt:
    position: int
    left_by: int
    """The step that has left it unfinished."""
    begun: Begun | None = None
    taken_by: int | None = None


@dataclass(slots=True)
class Carried:
    """All that waits, in the order in which it was left.

    Steps may overlap: a later one may have taken prompts that the checkpoint of an earlier one has to hold.
    """

    _prompts: list[_Prompt] = field(default_factory=list)

    @staticmethod
    def of_checkpoint(positions: Iterable[int]) -> Carried:
        """What a checkpoint holds; what had been sampled is lost."""
        return Carried([_Prompt(position, left_by=0) for position in positions])

    def take(self, step: int, most: int) -> tuple[int, ...]:
        """Places in the data set of the prompts that `step` begins with."""
        waiting = [prompt for prompt in self._prompts if prompt.taken_by is None][:most]
        for prompt in waiting:
            prompt.taken_by = step
        return tuple(prompt.position for prompt in waiting)

    def begun(self, step: int) -> dict[int, Begun]:
        """Of the prompts that `step` has taken: place in the data set -> what there is of it already."""
        mine = [prompt for prompt in self._prompts if prompt.taken_by == step]
        return {prompt.position: prompt.begun for prompt in mine if prompt.begun is not None}

    def forget_begun(self) -> None:
        """What there is of unfinished prompts may be lost: they begin anew."""
        for prompt in self._prompts:
            prompt.begun = None

    def leave(self, step: int, prompts: Iterable[tuple[int, Begun | None]]) -> None:
        """Keep what `step` has not finished: places in the data set, and what there is of each."""
        self._prompts += [_Prompt(position, step, begun) for position, begun in prompts]

    def after(self, step: int) -> tuple[int, ...]:
        """Places in the data set of all that `step` and those before it have left unfinished."""
        return tuple(
            prompt.position
            for prompt in self._prompts
            if prompt.left_by <= step and (prompt.taken_by is None or prompt.taken_by > step)
        )

    def commit(self, step: int) -> None:
        """Forget what `step` and those before it have taken."""
        self._prompts = [prompt for prompt in self._prompts if prompt.taken_by is None or prompt.taken_by > step]
