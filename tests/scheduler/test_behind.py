"""Runs that are sent behind others to the same workers, before those are through."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from plan_parts import ONE_RANK, executor, task

from dagrl.config.schema import Scope
from dagrl.planner.simulation.costs import CostTable
from dagrl.planner.simulation.simulate import simulate
from dagrl.scheduler.commands import (
    Command,
    CommandDone,
    Commit,
    Run,
    Save,
    ShardDone,
    StopRequested,
    Sync,
)
from dagrl.scheduler.plan import HOST, Executor, Plan
from dagrl.scheduler.scheduler import Scheduler

ALL = (0, 1, 2)


def plan(*tenants: Executor, **settings) -> Plan:
    """A reference on the trainer's own ranks, and rewards on the host; the update waits for both."""
    executors = [
        Executor(HOST, None, ONE_RANK * 3),
        executor("actor", "train", trained=True),
        executor("generator", "rollout", weights_from="actor"),
        *tenants,
    ]
    tasks = (
        task("prompts", HOST, scope=Scope.BATCH),
        task("rollout", "generator", "prompts", streams=True, generates=True),
        task("reward", HOST, "rollout"),
        task("ref", "actor", "rollout", frozen=True, engine="reference"),
        task("update", "actor", "reward", "ref", scope=Scope.BATCH, trains=True, engine="actor"),
    )
    return Plan({each.name: each for each in executors}, tasks, **{"shards": 3, "steps": 3, **settings})


class Play:
    """A step's way up to the moment at which its rollout has begun."""

    def __init__(self, plan: Plan, step: int = 1) -> None:
        self.scheduler = Scheduler(plan)
        pending = self.scheduler.start()
        while Run(step, "rollout", ALL) not in pending:
            pending += self.scheduler.handle(CommandDone(pending.pop(0)))

    def comes(self, shard: int, step: int = 1) -> list[Command]:
        return self.scheduler.handle(ShardDone(step, "rollout", shard))

    def ends(self, task: str, *shards: int, step: int = 1) -> list[Command]:
        return self.scheduler.handle(CommandDone(Run(step, task, shards)))


def test_an_update_is_sent_behind_the_log_probs_that_it_needs():
    play = Play(plan())
    assert play.comes(0) == [Run(1, "ref", (0,)), Run(1, "reward", (0,))]
    # More is to come, which could be computed together with this.
    assert play.comes(1) == [Run(1, "reward", (1,))]
    assert play.ends("ref", 0) == [Run(1, "ref", (1,))]
    # Nothing else is: it can as well be sent at once.
    assert play.comes(2) == [Run(1, "ref", (2,)), Run(1, "reward", (2,))]
    assert play.ends("rollout", *ALL) == play.ends("reward", 0) == play.ends("reward", 1) == []
    # There is room for one.
    assert play.ends("reward", 2) == []
    assert play.ends("ref", 1) == [Run(1, "update", ALL)]


def test_behind_an_update_come_its_weights_and_behind_those_a_rollout():
    play = Play(plan())
    play.ends("rollout", *ALL)
    assert [play.ends("reward", shard) for shard in ALL] == [[], [], [Run(1, "update", ALL)]]
    # All that is left of the step will be done without anything else.
    sync, rollout = Sync(2, "generator", "actor", 1), Run(2, "rollout", ALL)
    assert play.ends("ref", *ALL) == [sync, Run(2, "prompts", ALL)]
    assert play.ends("prompts", *ALL, step=2) == [rollout]
    assert play.ends("update", *ALL) == [Commit(1, save=False)]
    assert play.scheduler.version("generator") == 0
    assert play.scheduler.handle(CommandDone(sync)) == []
    assert play.scheduler.version("generator") == 1


def test_a_generator_with_anything_else_to_do_does_not_wait_for_weights_of_an_update():
    told = plan()
    tasks = (*told.tasks, task("judge", "generator", "reward"))
    play = Play(replace(told, tasks=tasks))
    play.ends("rollout", *ALL)
    play.ends("reward", 0), play.ends("reward", 1)
    assert Run(1, "update", ALL) in play.ends("reward", 2)
    # The step is not through: the generator has replies to give.
    assert play.ends("ref", *ALL) == []


def test_a_stop_drops_what_was_sent_behind_an_update():
    play = Play(plan())
    play.ends("rollout", *ALL)
    assert [play.ends("reward", shard) for shard in ALL][-1] == [Run(1, "update", ALL)]
    sync, prompts = play.ends("ref", *ALL)
    assert play.scheduler.handle(StopRequested()) == play.scheduler.handle(CommandDone(prompts)) == []
    assert play.ends("update", *ALL) == []
    # The trainer hands its weights out first.
    assert play.scheduler.handle(CommandDone(sync)) == [Save(1, "actor")]
    assert play.scheduler.handle(CommandDone(Save(1, "actor"))) == [Commit(1, save=True)]
    play.scheduler.handle(CommandDone(Commit(1, save=True)))
    assert play.scheduler.finished


def test_it_is_sent_at_once_where_it_waits_for_nothing_else():
    tasks = [each for each in plan().tasks if each.name != "reward"]
    tasks[-1] = replace(tasks[-1], inputs={"from_ref": ("ref", "ref")})
    play = Play(replace(plan(), tasks=tuple(tasks)))
    assert play.ends("rollout", *ALL) == [Run(1, "ref", ALL), Run(1, "update", ALL)]


@pytest.mark.parametrize("sleeps", [False, True])
def test_an_engine_on_the_same_devices_runs_between_the_two(sleeps):
    """Those who sleep wait in any case until nothing is left to do."""
    tenant = executor("critic", "train", trained=True, sleeps=sleeps)
    shared = plan(tenant)
    shared.executors["actor"] = replace(shared.executors["actor"], sleeps=sleeps)
    tasks = [*shared.tasks, task("values", "critic", "rollout", engine="critic")]
    play = Play(replace(shared, tasks=tuple(tasks)))
    sent = [command for command in play.ends("rollout", *ALL) if isinstance(command, Run)]
    assert Run(1, "ref", ALL) in sent
    for shard in range(3):
        sent += play.ends("reward", shard)
    assert (Run(1, "update", ALL) in sent) is sleeps


def test_a_generator_that_waits_for_weights_gets_them_between_the_two():
    play = Play(plan(max_staleness=1), step=2)
    scheduler = play.scheduler
    assert [play.ends("reward", shard) for shard in ALL] == [[], [], [Run(1, "update", ALL)]]
    assert scheduler.version("generator") == scheduler.version("actor") == 0
    assert play.ends("ref", *ALL) == [Run(3, "prompts", ALL)], "a generator at work gets its weights later"
    play.ends("update", *ALL)
    assert scheduler.version("actor") == 1
    begun = play.comes(0, step=2)
    assert Run(2, "ref", (0,)) in begun
    begun = [*play.comes(1, step=2), *play.comes(2, step=2)]
    assert not any(isinstance(command, Run) and command.task == "ref" for command in begun), "weights come before it"
    assert play.ends("rollout", *ALL, step=2) == []
    after = play.ends("ref", 0, step=2)
    assert after[0] == Sync(3, "generator", "actor", 1)
    assert Run(2, "ref", (1, 2)) in scheduler.handle(CommandDone(after[0]))


def test_in_a_simulation_it_begins_when_the_other_is_over():
    seen = simulate(plan(), CostTable(shard={"rollout": 5, "ref": 2, "update": 3}, sync=1), 3)
    assert list(seen.step_seconds.values()) == [1 + 15 + 2 + 9] * 3
    mine = [each for each in seen.activities if each.executor == "actor"]
    assert all(before.end <= after.start for before, after in pairwise(mine))
