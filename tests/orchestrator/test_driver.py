"""The end of a step: its files, and the order in which they are written."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from plan_parts import ONE_RANK, executor, task

from dagrl.config.schema import GroupSpec, Pipeline, Scope
from dagrl.orchestrator.driver import Driver
from dagrl.orchestrator.folder.checkpoint import RunState
from dagrl.orchestrator.groups.elastic import ElasticGroups
from dagrl.orchestrator.groups.worker_failures import RestartPolicy, WorkerFailures
from dagrl.orchestrator.steps.record import OpenSteps
from dagrl.scheduler.commands import Command, CommandDone, Commit, Run, Save
from dagrl.scheduler.plan import HOST, Executor, Plan
from dagrl.scheduler.scheduler import Scheduler
from dagrl.workers.errors import RunError


def test_a_run_that_ends_during_the_rename_of_a_checkpoint_has_logged_its_step(lab) -> None:
    """The checkpoint may be complete, so that a resumed run starts after the step and does not log it again."""
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
        alarms=SimpleNamespace(look=lambda step, metrics: []),
        _scorer=SimpleNamespace(score=lambda record: None),
        _elastic=SimpleNamespace(executors=(), missing=0),
        _writer=SimpleNamespace(finish=finish),
    )
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(driver._commit(Commit(3, save=True)))
    assert written == ["metrics", "checkpoint"]


EXECUTORS = {
    HOST: Executor(HOST, None, ONE_RANK * 2),
    "actor": executor("actor", "train", trained=True),
    "reference": executor("reference", "other"),
}


class _FailingInStepTwo(Driver):
    """A driver whose commands do nothing; tasks of step 2 fail while `slow` of step 1 is under way."""

    def __init__(self, plan: Plan, slow: type[Command], failing: tuple[str, ...]) -> None:
        self.plan, self.scheduler, self._slow, self._failing = plan, Scheduler(plan), slow, failing
        self._events, self._running, self._gave_up, self._unsaved = asyncio.Queue(), {}, None, None
        self._slow_began, self.notes = asyncio.Event(), []

        async def end() -> None:
            pass

        fixed = SimpleNamespace(groups={executor.group: GroupSpec() for executor in plan.executors.values()})
        elastic = ElasticGroups({}, plan, fixed, self.notes.append)  # type: ignore[arg-type]
        closed = SimpleNamespace(drain=end, join=end, close=lambda: None, cancel=lambda: None)
        vars(self).update(
            groups={HOST: SimpleNamespace(handles=[])},
            trackers=SimpleNamespace(note=self.notes.append),
            _recorder=closed,
            _writer=closed,
            _steps=SimpleNamespace(lost=lambda committed: []),
            _offloader=SimpleNamespace(describe=lambda workers: ""),
            _elastic=elastic,
            _failures=WorkerFailures(
                {}, plan, RestartPolicy(0), 1.0, self._running, self.scheduler.workers_of, elastic
            ),  # type: ignore[arg-type]
        )

    async def _event_of(self, command: Command) -> None:
        if isinstance(command, self._slow):
            self._slow_began.set()
            await asyncio.sleep(0.02)
        elif isinstance(command, Run) and command.step == 2 and command.task in self._failing:
            await self._slow_began.wait()
            raise RunError("the judge does not answer")


class _ReportingTwice(_FailingInStepTwo):
    async def _event_of(self, command: Command) -> None:
        if command == Run(1, "reward", (0,)):
            self._events.put_nowait(CommandDone(command))


@pytest.mark.parametrize("slow", [Save, Commit])
@pytest.mark.parametrize("failing", [("reward",), ("reward", "ref")])
def test_the_step_before_a_failure_is_saved(slow: type[Command], failing: tuple[str, ...]) -> None:
    tasks = (
        task("prompts", HOST, scope=Scope.BATCH),
        task("reward", HOST, "prompts"),
        task("ref", "reference", "prompts"),
        task("update", "actor", "reward", "ref", scope=Scope.BATCH, trains=True),
    )
    plan = Plan(EXECUTORS, tasks, shards=2, steps=3, save_every=1, max_staleness=1)

    async def train() -> _FailingInStepTwo:
        driver = _FailingInStepTwo(plan, slow, failing)
        with pytest.raises(RunError, match="does not answer"):
            await driver.train()
        return driver

    driver = asyncio.run(train())
    assert driver.scheduler.committed == 1
    assert len(driver.notes) == 1


def test_an_event_that_comes_twice_ends_the_run_with_the_story() -> None:
    tasks = (
        task("prompts", HOST, scope=Scope.BATCH),
        task("reward", HOST, "prompts"),
        task("update", "actor", "reward", scope=Scope.BATCH, trains=True),
    )

    async def train() -> None:
        await _ReportingTwice(Plan(EXECUTORS, tasks, shards=2, steps=3), Save, ()).train()

    with pytest.raises(RunError, match="`run reward of step 1, shards 0` has ended, but is not under way") as raised:
        asyncio.run(train())
    assert "event: done: run reward of step 1, shards 0" in raised.value.details
