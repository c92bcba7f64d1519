"""Buffers and tasks with state take the steps in order, also where a later step is ready first."""

from __future__ import annotations

import pytest
from plan_parts import ONE_RANK, executor, task

from dagrl.config.schema import Scope
from dagrl.scheduler.commands import CommandDone, Commit, Run, Save, Sync
from dagrl.scheduler.plan import HOST, Executor, Plan
from dagrl.scheduler.scheduler import Scheduler


@pytest.mark.parametrize("kind", ["replays", "in_order"])
def test_a_later_step_waits_for_the_buffer_of_the_one_before(kind: str) -> None:
    executors = [
        Executor(HOST, None, ONE_RANK * 4),
        executor("actor", "train", trained=True),
        executor("generator", "rollout", weights_from="actor"),
    ]
    tasks = (
        task("prompts", HOST, scope=Scope.BATCH),
        task("rollout", "generator", "prompts", scope=Scope.BATCH, generates=True),
        task("reward", HOST, "rollout", scope=Scope.BATCH),
        task("replay", HOST, "reward", scope=Scope.BATCH, **{kind: True}),
        task("update", "actor", "replay", scope=Scope.BATCH, trains=True),
    )
    plan = Plan({each.name: each for each in executors}, tasks, shards=1, steps=2, max_staleness=1)
    scheduler = Scheduler(plan)
    running, late = scheduler.start(), Run(1, "reward", (0,))
    done = []
    while running:
        command = next((each for each in running if each != late), late)
        running.remove(command)
        done.append(command)
        running += scheduler.handle(CommandDone(command))
    runs = [(each.task, each.step) for each in done if isinstance(each, Run)]
    assert runs.index(("reward", 2)) < runs.index(("reward", 1)) < runs.index(("replay", 1)) < runs.index(("replay", 2))
    assert {type(each) for each in done} == {Run, Sync, Save, Commit}
    assert scheduler.finished


def test_a_buffer_before_a_filter_goes_on_in_the_next_step():
    tasks = (
        task("prompts", HOST, scope=Scope.BATCH, in_rounds=True),
        task("buffer", HOST, "prompts", scope=Scope.BATCH, replays=True, in_rounds=True),
        task("filter", HOST, "buffer", scope=Scope.BATCH, selects=True, in_rounds=True),
        task("update", "actor", "filter", scope=Scope.BATCH, trains=True),
    )
    executors = {HOST: Executor(HOST, None, ONE_RANK), "actor": executor("actor", "train", trained=True)}
    scheduler = Scheduler(Plan(executors, tasks, shards=2, steps=3))
    pending = scheduler.start()
    while pending:
        pending += scheduler.handle(CommandDone(pending.pop(0)))
    assert scheduler.committed == 3
