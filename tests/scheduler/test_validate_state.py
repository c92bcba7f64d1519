"""Faults that are planted in the scheduler: each is found, with the story of the task or executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from plan_parts import ONE_RANK, executor, task

from dagrl.config.residency import Residency
from dagrl.config.schema import Scope
from dagrl.scheduler.commands import Command, CommandDone, Run, ShardDone, Sync
from dagrl.scheduler.history import SchedulerError
from dagrl.scheduler.open_steps import OpenSteps
from dagrl.scheduler.plan import HOST, Executor, Plan
from dagrl.scheduler.resources import DirtySet, ResourceTracker
from dagrl.scheduler.scheduler import Scheduler
from dagrl.scheduler.syncs import WeightVersions
from dagrl.scheduler.task_state import ShardByShard, TaskState
from dagrl.scheduler.time_sharing import TimeSharing

EXECUTORS = [
    Executor(HOST, None, ONE_RANK * 2),
    executor("actor", "train", trained=True, sleeps=True),
    executor("critic", "train", trained=True, sleeps=True),
    executor("generator", "rollout", weights_from="actor"),
]
TASKS = (
    task("prompts", HOST, scope=Scope.BATCH),
    task("rollout", "generator", "prompts", streams=True, generates=True),
    task("reward", HOST, "rollout"),
    task("critic_update", "critic", "reward", scope=Scope.BATCH, trains=True),
    task("update", "actor", "reward", scope=Scope.BATCH, trains=True),
)
PLAN = Plan({each.name: each for each in EXECUTORS}, TASKS, shards=3, steps=6, max_staleness=1)


def play(plan: Plan = PLAN, seed: int = 0) -> None:
    """A whole run, in which chance decides which command ends next."""
    scheduler, chance = Scheduler(plan), Random(seed)
    pending: list[Command] = scheduler.start()
    while not scheduler.finished:
        scheduler.validate_state()
        ends = pending.pop(chance.randrange(len(pending)))
        if isinstance(ends, Run) and ends.task == "rollout":
            pending += scheduler.handle(ShardDone(ends.step, ends.task, ends.shards[0]))
            scheduler.validate_state()
        pending += scheduler.handle(CommandDone(ends))


def _keeps(tracker: ResourceTracker, command: Command, release=ResourceTracker.release) -> None:
    if not isinstance(command, Sync):
        release(tracker, command)


def _starts_again(progress: ShardByShard, shards, finish=ShardByShard.finish) -> list[int]:
    new = finish(progress, shards)
    progress._waiting += new
    return new


def _forgets(state: TaskState, step: int, mark=TaskState.mark_ready) -> None:
    if (state.task.name, step) != ("reward", 2):
        mark(state, step)


def _loses(progress: ShardByShard, shards, supply=ShardByShard.supply) -> None:
    supply(progress, [shard for shard in shards if shard != 1])


def _stays_clean(dirty: DirtySet, *executors: str, mark=DirtySet.mark) -> None:
    if executors != (HOST,):
        mark(dirty, *executors)


def _opens_early(steps: OpenSteps, begin=OpenSteps.open) -> None:
    steps._plan = replace(PLAN, max_staleness=PLAN.max_staleness + 1)
    begin(steps)


def _wants_older(versions: WeightVersions, step: int, task, wanted=WeightVersions.wanted) -> int:
    return max(0, wanted(versions, step, task) - 1)


def _is_awake(sharing: TimeSharing, executor: str) -> Residency:
    return Residency.AWAKE


@pytest.mark.parametrize(
    ("owner", "name", "fault", "cause", "story"),
    [
        (ResourceTracker, "release", _keeps, "is held by a command that has ended", "done: sync generator"),
        (
            ShardByShard,
            "finish",
            _starts_again,
            "reward of step 1: .* wait to run, but may not",
            "done: run reward of step 1",
        ),
        (
            TaskState,
            "mark_ready",
            _forgets,
            "reward of step 2: it is ready, but no longer",
            "begin: run rollout of step 2",
        ),
        (ShardByShard, "supply", _loses, "shards 1 are ready, but do not wait", "done: run rollout of step 1"),
        (DirtySet, "mark", _stays_clean, "could have begun earlier", "run prompts of step 1"),
        (OpenSteps, "open", _opens_early, "step 3 is open, while step 1", "run prompts of step 1"),
        (WeightVersions, "wanted", _wants_older, "the oldest allowed is", "begin: run rollout of step"),
        (TimeSharing, "residency", _is_awake, "share the memory of train", "under way"),
    ],
    ids=["release", "twice", "forgotten task", "lost shard", "not dirty", "opens early", "old weights", "memory"],
)
def test_a_planted_fault_is_found_with_its_story(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: Callable, cause: str, story: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(SchedulerError, match=cause) as raised:
        for seed in range(20):
            play(seed=seed)
    assert story in raised.value.story


def test_without_a_fault_nothing_is_found() -> None:
    for seed in range(20):
        play(seed=seed)


def test_a_scheduler_that_waits_for_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `validate_state`, a forgotten task ends in a deadlock."""
    monkeypatch.setattr(TaskState, "mark_ready", _forgets)
    monkeypatch.setattr(Scheduler, "validate_state", lambda scheduler: None)
    with pytest.raises(SchedulerError, match="nothing is under way") as raised:
        play()
    assert "run rollout of step 2" in raised.value.story and raised.value.story.endswith("nothing")
