"""What a filter has let pass of a step, round by round: whether that is enough, and what the batch is. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dagrl.config.schema import FilterNode, Pipeline
from dagrl.graph.filtering import prompts_per_round
from dagrl.workers.errors import RunError


class Selection:
    """The groups of one step."""

    def __init__(self, pipeline: Pipeline, name: str, step: int) -> None:
        """`name` of the filter."""
        node = pipeline.nodes[name]
        assert isinstance(node, FilterNode)
        self._node, self._place = node, f"{name} (step {step})"
        self._needed, self._most = pipeline.data.prompts_per_step, prompts_per_round(pipeline)
        self._passed: list[int] = []
        self._failed: list[int] = []
        self._rounds = 0

    def note(self, groups: Sequence[int], passed: Iterable[int]) -> None:
        """A round had these `groups`, of which some have passed."""
        self._rounds += 1
        kept = set(passed)
        self._passed += [group for group in groups if group in kept]
        self._failed += [group for group in groups if group not in kept]

    def is_short(self) -> bool:
        """Whether another round is needed. RunError where there have been as many as there may be."""
        if self._missing <= 0:
            return False
        if self._rounds < self._node.max_rounds:
            return True
        if self._node.when_short == "fill":
            return False
        begun = len(self._passed) + len(self._failed)
        rounds = "1 round" if self._rounds == 1 else f"{self._rounds} rounds"
        raise RunError(
            f"{len(self._passed)} of {begun} prompts have passed in {rounds}, and the step needs {self._needed}",
            node=self._place,
            hint="choose data that are neither too easy nor too hard for the model, widen the filter's bounds, raise "
            "its max_rounds or prompts_per_round, or set when_short: fill",
        )

    def next_round(self) -> int:
        """Prompts of the next round: as many as it is likely to take, with two standard deviations on top.

        The trials until the missing groups have passed are distributed as negative binomial; the share that passes is
        estimated by Laplace's rule of succession, from this step alone, so that a step is the same whenever it is run.
        """
        begun = len(self._passed) + len(self._failed)
        share = (len(self._passed) + 1) / (begun + 2)
        likely = (self._missing + 2 * math.sqrt(self._missing * (1 - share))) / share
        return min(self._most, math.ceil(likely))

    def batch(self) -> list[int]:
        """The groups of the step, ascending: the first that have passed, then what it is filled up with."""
        return sorted([*self._passed, *self._failed[: max(0, self._missing)]][: self._needed])

    def metrics(self) -> dict[str, float]:
        """What is told of the step."""
        filled = {"filter/filled_prompts": float(max(0, self._missing))} if self._node.when_short == "fill" else {}
        return {
            "filter/rounds": float(self._rounds),
            "filter/kept_fraction": len(self._passed) / (len(self._passed) + len(self._failed)),
            "filter/surplus_prompts": float(max(0, -self._missing)),
            **filled,
        }

    @property
    def _missing(self) -> int:
        return self._needed - len(self._passed)
