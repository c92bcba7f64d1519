"""The score of a checkpoint, by the metric of ``run.keep_best``."""

from __future__ import annotations

import math
from collections.abc import Callable

from dagrl.config.errors import suggest
from dagrl.config.schema import KeepBestSpec
from dagrl.orchestrator.folder.checkpoint import Score
from dagrl.orchestrator.steps.record import StepRecord
from dagrl.scheduler.plan import Plan


class CheckpointScorer:
    """Scores the steps that are saved."""

    def __init__(self, best: KeepBestSpec | None, plan: Plan, note: Callable[[str], None]) -> None:
        """`note` is called once if there is no such metric."""
        self._best, self._plan, self._note = best, plan, note
        self._noted = False

    def score(self, record: StepRecord) -> Score | None:
        """The step's score. None if the metric was not measured, or is not finite."""
        if self._best is None:
            return None
        measured, metric = record.measured(), self._best.metric
        value = measured.get(metric)
        if value is not None and math.isfinite(value):
            return Score(metric, value)
        if value is None and not self._noted and (self._plan.validates(record.step) or not metric.startswith("val/")):
            self._noted = True
            self._note(f"run.keep_best: step {record.step} has no metric {metric}; {suggest(metric, sorted(measured))}")
        return None
