"""The rounds of all steps under way: how many prompts each takes, and what becomes of the batch when one is over."""

from __future__ import annotations

from dagrl.config.schema import Pipeline
from dagrl.graph.filtering import prompts_begun
from dagrl.orchestrator.steps.batch_index import Ledger
from dagrl.orchestrator.steps.record import StepRecord
from dagrl.orchestrator.steps.selection import Selection
from dagrl.scheduler.commands import BatchShort, Event, Run, RunDone
from dagrl.scheduler.plan import Plan
from dagrl.workers.messages import Block


class Rounds:
    """One run's; without a filter a step has a single round, which nobody asks about."""

    def __init__(self, pipeline: Pipeline, plan: Plan) -> None:
        self._pipeline = pipeline
        self._filter = next((task.node for task in plan.tasks if task.selects), "")
        self._selections: dict[int, Selection] = {}

    def prompts(self, run: Run) -> int:
        """Prompts that a run of the source begins."""
        return prompts_begun(self._pipeline, self._selections[run.step].next_round() if run.round else None)

    def note(self, run: Run, ledger: Ledger, block: Block) -> None:
        """A filter's `block` has the rows of the groups that pass, of those of its round."""
        if run.step not in self._selections:
            self._selections[run.step] = Selection(self._pipeline, self._filter, run.step)
        self._selections[run.step].note(ledger.groups_in(ledger.rows(run.shards)), ledger.groups_in(block.rows))

    def end(self, run: Run, ledger: Ledger, record: StepRecord) -> Event:
        """A filter's run is over: the batch begins another round, or is from now on what the filter has chosen.

        RunError where there may be no further round, and the batch is not full.
        """
        selection = self._selections[run.step]
        if selection.is_short():
            ledger.begin_round()
            return BatchShort(run)
        ledger.select(selection.batch())
        for name, figure in selection.metrics().items():
            record.count(name, figure)
        return RunDone(run)

    def forget(self, step: int) -> None:
        """The step is committed."""
        self._selections.pop(step, None)
