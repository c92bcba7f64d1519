"""The end of a step: what is written of it, and in which order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from dagrl.config.schema import Pipeline
from dagrl.orchestrator.driver import Driver
from dagrl.orchestrator.folder.checkpoint import RunState
from dagrl.orchestrator.steps.record import OpenSteps
from dagrl.scheduler.commands import Commit


def test_a_run_that_ends_during_the_rename_of_a_checkpoint_has_logged_its_step(lab) -> None:
    """The checkpoint may be whole in the end, and the run go on behind the step: nobody would tell of it any more."""
    written: list[str] = []

    async def finish(state: RunState) -> None:
        written.append("checkpoint")
        raise asyncio.CancelledError

    pipeline = Pipeline.model_validate(lab.tiny_pipeline())
    plan = SimpleNamespace(tasks=(), only_validates=False, validates=lambda step: False, samples_per_prompt=1)
    driver = object.__new__(Driver)
    vars(driver).update(
        pipeline=pipeline,
        plan=plan,
        trackers=SimpleNamespace(log=lambda step, metrics: written.append("metrics"), timeline=[]),
        _steps=OpenSteps(pipeline, plan),  # type: ignore[arg-type]
        _exchange=SimpleNamespace(is_part=False, policy_version=lambda step: step, used=lambda step: {}),
        _last_commit=None,
        _restarts=SimpleNamespace(count=0),
        _carried=SimpleNamespace(end_step=lambda *_, **__: {}, after=lambda *_: RunState(3, "model")),
        _scorer=SimpleNamespace(score=lambda record: None),
        _writer=SimpleNamespace(finish=finish),
    )
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(driver._commit(Commit(3, save=True)))
    assert written == ["metrics", "checkpoint"]
