"""The end of a step: what is written of it, and in which order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from dagrl.config.schema import Pipeline
from dagrl.orchestrator.driver import Driver
from dagrl.orchestrator.folder.checkpoint import RunState
from dagrl.orchestrator.steps.partial_rollouts import PartialRolloutBuffer
from dagrl.orchestrator.steps.record import StepRecord
from dagrl.scheduler.commands import Commit


def test_a_run_that_ends_during_the_rename_of_a_checkpoint_has_logged_its_step(lab) -> None:
    """The checkpoint may be whole in the end, and the run go on behind the step: nobody would tell of it any more."""
    written: list[str] = []

    async def finish(state: RunState) -> None:
        written.append("checkpoint")
        raise asyncio.CancelledError

    driver = object.__new__(Driver)
    vars(driver).update(
        pipeline=Pipeline.model_validate(lab.tiny_pipeline()),
        trackers=SimpleNamespace(log=lambda step, metrics: written.append("metrics"), timeline=[]),
        plan=SimpleNamespace(only_validates=False, validates=lambda step: False),
        _overlong={},
        _records={3: StepRecord(3)},
        _batches={},
        _feed=SimpleNamespace(metrics=lambda step: {}, learn_metrics=lambda *_, **__: None, after=lambda step: {}),
        _exchange=None,
        _last_commit=None,
        _restarts=SimpleNamespace(count=0),
        _partial_rollouts=PartialRolloutBuffer(()),
        _kl=SimpleNamespace(after=lambda step: {}),
        _baselines=SimpleNamespace(after=lambda step: {}),
        _scorer=SimpleNamespace(score=lambda record: None),
        _writer=SimpleNamespace(finish=finish),
    )
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(driver._commit(Commit(3, save=True)))
    assert written == ["metrics", "checkpoint"]
