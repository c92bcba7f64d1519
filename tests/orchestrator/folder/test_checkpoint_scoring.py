"""The score of a step's checkpoint: the metric that the pipeline names, where it was measured."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dagrl.config.schema import KeepBestSpec
from dagrl.data.stats import Stat
from dagrl.orchestrator.checkpoint_writer import CheckpointScorer
from dagrl.orchestrator.folder.checkpoint import Score
from dagrl.orchestrator.steps.record import StepRecord
from dagrl.scheduler.commands import Run
from dagrl.scheduler.plan import Plan, WorkerId
from dagrl.workers.messages import Block

PLAN = Plan({}, (), shards=1, steps=9, validate_every=3)


def record(step: int, **stats: float) -> StepRecord:
    record, nothing = StepRecord(step), np.zeros(0, dtype=np.int64)
    measured = {name.replace("__", "/"): Stat.of([value]) for name, value in stats.items()}
    record.add_block(Run(step, "any", (0,)), Block(nothing, None, None, 0, 1, (0,), measured), WorkerId("w", 0))
    return record


@pytest.fixture
def notes() -> list[str]:
    return []


def test_a_metric_is_taken_by_its_name_in_the_metrics(notes: list[str]) -> None:
    scoring = CheckpointScorer(KeepBestSpec(metric="val/reward/mean"), PLAN, notes.append)
    assert scoring.score(record(3, val__reward=0.5)) == Score("val/reward/mean", 0.5)
    assert notes == []


def test_a_step_without_validation_has_no_score_and_no_warning(notes: list[str]) -> None:
    scoring = CheckpointScorer(KeepBestSpec(metric="val/reward/mean"), PLAN, notes.append)
    assert scoring.score(record(4, reward=0.5)) is None
    assert notes == []


def test_an_unknown_metric_is_reported_once(notes: list[str]) -> None:
    scoring = CheckpointScorer(KeepBestSpec(metric="val/rewards/mean"), PLAN, notes.append)
    assert scoring.score(record(3, val__reward=0.5)) is None
    assert scoring.score(record(6, val__reward=0.5)) is None
    assert notes == ["run.keep_best: step 3 has no metric val/rewards/mean; did you mean `val/reward/mean`?"]


def test_a_value_that_is_no_number_is_no_score(notes: list[str]) -> None:
    scoring = CheckpointScorer(KeepBestSpec(metric="kl/ref"), PLAN, notes.append)
    assert scoring.score(record(3, kl__ref=math.nan)) is None
    assert notes == []


def test_without_keep_best_there_is_no_score(notes: list[str]) -> None:
    assert CheckpointScorer(None, PLAN, notes.append).score(record(3, val__reward=0.5)) is None
