"""Tasks on the moving average of a trainer's weights: always that of the step before."""

from __future__ import annotations

from random import Random

import pytest
from plan_parts import ONE_RANK, executor, task

from dagrl.config.schema import Scope
from dagrl.scheduler.commands import Command, CommandDone, Run
from dagrl.scheduler.plan import HOST, Executor, Plan
from dagrl.scheduler.scheduler import Scheduler


def plan(*, is_read: bool, max_staleness: int) -> Plan:
    executors = [
        Executor(HOST, None, ONE_RANK * 3),
        executor("actor", "train", trained=True),
        executor("generator", "rollout", weights_from="actor"),
    ]
    tasks = (
        task("prompts", HOST, scope=Scope.BATCH),
        task("rollout", "generator", "prompts", streams=True, generates=True),
        task("average", "actor", "rollout", averaged=True),
        task("update", "actor", "rollout", *(("average",) if is_read else ()), scope=Scope.BATCH, trains=True),
    )
    return Plan({each.name: each for each in executors}, tasks, shards=3, steps=5, max_staleness=max_staleness)


@pytest.mark.parametrize("is_read", [True, False], ids=["read by the update", "read by no update"])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_it_is_that_of_the_step_before(is_read: bool, max_staleness: int, seed: int) -> None:
    chance, scheduler = Random(seed), Scheduler(plan(is_read=is_read, max_staleness=max_staleness))
    pending: list[Command] = scheduler.start()
    used = []
    while pending:
        # Queued runs are carried out in order.
        first = {scheduler.workers_of(each): each for each in reversed(pending)}
        command = chance.choice([*first.values()])
        pending.remove(command)
        if isinstance(command, Run) and command.task == "average":
            used += [(command.step, scheduler.version("actor"))] * len(command.shards)
        pending += scheduler.handle(CommandDone(command))
    assert scheduler.finished
    assert used == [(step, step - 1) for step in range(1, 6) for _ in range(3)]
