"""How good the checkpoint of a step is, by the metric that ``run.keep_best`` names."""

from __future__ import annotations

import math
from collections.abc import Callable

from dagrl.config.errors import suggest
from dagrl.config.schema import KeepBestSpec
from dagrl.orchestrator.folder.checkpoint import Score
from dagrl.orchestrator.steps.record import StepRecord
from dagrl.scheduler.plan import Plan


class Scoring:
    """Scores the steps that are saved."""

    def __init__(self, best: KeepBestSpec | None, plan: Plan, note: Callable[[str], None]) -> None:
        """`note` tells the user, once, that there is no such metric."""
        self._best, self._plan, self._note = best, plan, note
        self._told = False

    def score(self, record: StepRecord) -> Score | None:
        """The step's score; None where it was not measured in it, or is no number."""
        if self._best is None:
            return None
        measured, metric = record.measured(), self._best.metric
        value = measured.get(metric)
        if value is not None and math.isfinite(value):
            return Score(metric, value)
        if value is None and not self._told and (self._plan.validates(record.step) or not metric.startswith("val/")):
            self._told = True
            self._note(f"run.keep_best: step {record.step} has no metric {metric}; {suggest(metric, sorted(measured))}")
        return None
