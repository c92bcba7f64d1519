"""Dynamic sampling: the number of prompts of each round of a step, and the groups of all rounds that form the batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dagrl.config.schema import FilterNode, Pipeline
from dagrl.config.schema.rounds import prompts_begun, prompts_per_round
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.orchestrator.steps.record import StepRecord
from dagrl.scheduler.commands import BatchShort, CommandDone, Event, Run
from dagrl.scheduler.plan import Plan
from dagrl.workers.errors import RunError
from dagrl.workers.messages import Block


class DynamicSampling:
    """The rounds of all open steps. Without a filter a step has one round."""

    def __init__(self, pipeline: Pipeline, plan: Plan) -> None:
        self._pipeline = pipeline
        self._filter = next((task.node for task in plan.tasks if task.selects), "")
        self._selections: dict[int, Selection] = {}

    def prompts(self, run: Run) -> int:
        return prompts_begun(self._pipeline, self._selections[run.step].next_round() if run.round else None)

    def add(self, run: Run, batch: BatchIndex, block: Block) -> None:
        if run.step not in self._selections:
            self._selections[run.step] = Selection(self._pipeline, self._filter, run.step)
        self._selections[run.step].add(batch.groups_in(batch.rows(run.shards)), batch.groups_in(block.rows))

    def end_round(self, run: Run, batch: BatchIndex, record: StepRecord) -> Event:
        """Begin another round, or make the selected groups the batch. Raises RunError after the last round."""
        selection = self._selections[run.step]
        if selection.is_short():
            batch.begin_round()
            return BatchShort(run)
        batch.select(selection.batch())
        record.account.end(selection.filtered(), "filtered")
        for name, value in selection.metrics().items():
            record.add_number(name, value)
        return CommandDone(run)

    def commit(self, step: int) -> None:
        self._selections.pop(step, None)


class Selection:
    """The groups of one step that have passed the filter. Pure."""

    def __init__(self, pipeline: Pipeline, name: str, step: int) -> None:
        node = pipeline.nodes[name]
        assert isinstance(node, FilterNode)
        self._node, self._place = node, f"{name} (step {step})"
        self._needed, self._max_prompts = pipeline.data.prompts_per_step, prompts_per_round(pipeline)
        self._passed: list[int] = []
        self._failed: list[int] = []
        self._rounds = 0

    def add(self, groups: Sequence[int], passed: Iterable[int]) -> None:
        self._rounds += 1
        kept = set(passed)
        self._passed += [group for group in groups if group in kept]
        self._failed += [group for group in groups if group not in kept]

    def is_short(self) -> bool:
        """Whether another round is needed. Raises RunError after the last round."""
        if self._missing <= 0:
            return False
        if self._rounds < self._node.max_rounds:
            return True
        if self._node.when_short == "fill":
            return False
        rounds = "1 round" if self._rounds == 1 else f"{self._rounds} rounds"
        raise RunError(
            f"{len(self._passed)} of {self._sampled} prompts have passed in {rounds}, and the step needs "
            f"{self._needed}",
            node=self._place,
            hint="choose data that are neither too easy nor too hard for the model, widen the filter's bounds, raise "
            "its max_rounds or prompts_per_round, or set when_short: fill",
        )

    def next_round(self) -> int:
        """Prompts of the next round: the expected number plus two standard deviations.

        The number of trials until the missing groups have passed has a negative binomial distribution. Laplace's rule
        of succession estimates the pass rate from this step alone, so that a step is reproducible.
        """
        rate = (len(self._passed) + 1) / (self._sampled + 2)
        likely = (self._missing + 2 * math.sqrt(self._missing * (1 - rate))) / rate
        return min(self._max_prompts, math.ceil(likely))

    def batch(self) -> list[int]:
        """The groups of the step, ascending: the first groups that passed, then failed ones to fill it."""
        return sorted([*self._passed, *self._failed[: max(0, self._missing)]][: self._needed])

    def filtered(self) -> list[int]:
        """The groups that did not pass and are not part of the step."""
        return self._failed[max(0, self._missing) :]

    def metrics(self) -> dict[str, float]:
        filled = {"filter/filled_prompts": float(max(0, self._missing))} if self._node.when_short == "fill" else {}
        return {
            "filter/rounds": float(self._rounds),
            "filter/kept_fraction": len(self._passed) / self._sampled,
            **filled,
        }

    @property
    def _sampled(self) -> int:
        return len(self._passed) + len(self._failed)

    @property
    def _missing(self) -> int:
        return self._needed - len(self._passed)
