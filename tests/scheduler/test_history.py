"""Events that belong to no command, and the story that explains them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_parts import ONE_RANK, executor, task

from dagrl.config.schema import Scope
from dagrl.scheduler.commands import BatchShort, Command, CommandDone, Run, ShardDone, WorkerLost
from dagrl.scheduler.history import SchedulerError
from dagrl.scheduler.plan import HOST, Executor, Plan
from dagrl.scheduler.scheduler import Scheduler

EXECUTORS = [
    Executor(HOST, None, ONE_RANK),
    executor("actor", "train", trained=True),
    executor("generator", "rollout", weights_from="actor"),
]
TASKS = (
    task("prompts", HOST, scope=Scope.BATCH),
    task("rollout", "generator", "prompts", streams=True, generates=True),
    task("update", "actor", "rollout", scope=Scope.BATCH, trains=True),
)
PLAN = Plan({each.name: each for each in EXECUTORS}, TASKS, shards=2, steps=3)


def rollout_under_way() -> tuple[Scheduler, Run]:
    scheduler, commands = Scheduler(PLAN), list[Command]()
    commands += scheduler.start()
    while not isinstance(rollout := commands.pop(0), Run) or rollout.task != "rollout":
        commands += scheduler.handle(CommandDone(rollout))
    return scheduler, rollout


@pytest.mark.parametrize(
    "events",
    [
        lambda run: [CommandDone(run), CommandDone(run)],
        lambda run: [CommandDone(run), ShardDone(run.step, run.task, 0)],
        lambda run: [CommandDone(replace(run, step=2))],
        lambda run: [ShardDone(run.step, run.task, 0, round=1)],
        lambda run: [ShardDone(run.step, "update", 0)],
        lambda run: [BatchShort(replace(run, round=1))],
        lambda run: [WorkerLost("generator"), CommandDone(run)],
        lambda run: [WorkerLost("actor")],
    ],
    ids=["twice", "a late shard", "another step", "another round", "another task", "short", "after a loss", "trained"],
)
def test_an_event_that_no_command_explains_ends_with_its_story(events) -> None:
    scheduler, rollout = rollout_under_way()
    with pytest.raises(SchedulerError) as raised:
        scheduler.handle(*events(rollout))
    assert "scheduler" in str(raised.value) and "\n" not in str(raised.value)
    assert "run rollout of step 1, shards 0, 1" in raised.value.story


def test_a_shard_may_be_reported_again_after_a_loss() -> None:
    scheduler, _ = rollout_under_way()
    scheduler.handle(ShardDone(1, "rollout", 0), ShardDone(1, "rollout", 0))
    scheduler.validate_state()


def test_a_story_is_of_its_tasks_and_of_its_step() -> None:
    scheduler, rollout = rollout_under_way()
    scheduler.handle(CommandDone(rollout))
    assert scheduler.history.story(["rollout"], 1).splitlines()[:4] == [
        "#5 begin: run rollout of step 1, shards 0, 1",
        "#6 event: done: run rollout of step 1, shards 0, 1",
        "under way:",
        "  run update of step 1, shards 0, 1",
    ]
    assert scheduler.history.story(["rollout"], 2).startswith("under way:")
    assert "sync generator with version 0 of actor" in scheduler.history.story(["generator"])


def test_only_the_last_commands_and_events_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.scheduler.history._KEPT", 3)
    scheduler, _ = rollout_under_way()
    numbers = [line.split()[0] for line in scheduler.history.story().splitlines() if line.startswith("#")]
    assert numbers == ["#3", "#4", "#5"]
