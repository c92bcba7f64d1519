"""Generators a step ahead: their weights come before their source goes on, so that neither side waits for the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_parts import ONE_RANK, executor, task

from dagrl.config.schema import Scope
from dagrl.planner.simulation.costs import CostTable
from dagrl.planner.simulation.simulate import simulate
from dagrl.scheduler.commands import CommandDone, Run
from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import HOST, Executor, Plan
from dagrl.scheduler.scheduler import Scheduler

ALL = (0, 1)
STEPS = 8


def plan(*, old: bool = True, streams: bool = False, **settings) -> Plan:
    """Old log-probs and updates on one engine, rollouts on another, in two shards."""
    executors = [
        Executor(HOST, None, ONE_RANK * 3),
        executor("actor", "train", trained=True),
        executor("generator", "rollout", weights_from="actor"),
    ]
    tasks = [
        task("prompts", HOST, scope=Scope.BATCH),
        task("rollout", "generator", "prompts", streams=True, generates=True),
        task("reward", HOST, "rollout"),
    ]
    if old:
        tasks.append(task("old", "actor", "rollout"))
    reads, pieces = ("reward", "old") if old else ("reward",), ((0,), (1,)) if streams else ()
    tasks.append(task("update", "actor", *reads, scope=Scope.BATCH, trains=True, pieces=pieces))
    return Plan({each.name: each for each in executors}, tuple(tasks), **{"shards": 2, "steps": STEPS, **settings})


def steady(plan: Plan, sync: float = 1.0, **shard: float) -> list[float]:
    """Seconds of the steps after the first few, where each shard of a task takes its seconds."""
    seen = simulate(plan, CostTable(shard=shard, sync=sync), STEPS)
    return [seen.step_seconds[step] for step in range(4, STEPS)]


@pytest.mark.parametrize(
    ("shard", "a_step"),
    [
        # The slower of the two, and the sync, for which both stand still.
        ({"rollout": 5, "old": 1, "update": 2.5}, 11),
        ({"rollout": 2.5, "old": 2, "update": 4}, 13),
        ({"rollout": 5, "old": 2, "update": 3}, 11),
    ],
    ids=["rollouts take longer", "training takes longer", "both take as long"],
)
def test_a_step_takes_as_long_as_the_slower_side(shard, a_step):
    assert steady(plan(max_staleness=1), **shard) == [a_step] * 4


def test_without_a_version_between_them_it_takes_as_long_as_both():
    # Log-probs of the first shard are computed beside the rollout of the second.
    assert steady(plan(), rollout=5, old=2, update=3) == [10 + 2 + 6 + 1] * 4


def test_a_generator_that_is_about_to_begin_gets_its_weights_before_their_source_continues():
    costs = CostTable(shard={"rollout": 5, "old": 2, "update": 3}, sync=1)
    activities = simulate(plan(max_staleness=1), costs, STEPS).activities

    def of(name: str, step: int) -> list[Activity]:
        return [each for each in activities if each.name == name and each.step == step]

    for step in range(4, STEPS):
        (sync,), ended = of("sync", step), max(each.end for each in of("rollout", step - 1))
        assert (sync.start, sync.end) == (ended, ended + 1)
        assert of("old", step - 1)[1].start == ended + 1


def test_prompts_come_before_what_older_steps_have_for_the_host():
    scheduler = Scheduler(
        replace(plan(max_staleness=1), executors=plan().executors | {HOST: Executor(HOST, None, ONE_RANK)})
    )
    pending = scheduler.start()
    while (begun := pending.pop(0)) != Run(1, "update", ALL):
        pending += scheduler.handle(CommandDone(begun))
    # The one worker of the host has rewards of step 2 to compute, and the generator nothing to do.
    (busy,) = [each for each in pending if isinstance(each, Run) and each.task == "reward"]
    assert Run(3, "prompts", ALL) not in scheduler.handle(CommandDone(begun)), "the worker is taken"
    assert [each for each in scheduler.handle(CommandDone(busy)) if isinstance(each, Run)] == [Run(3, "prompts", ALL)]


def test_weights_in_flight_cost_the_generator_nothing():
    assert steady(plan(max_staleness=1, in_flight=True), rollout=5, old=1, update=2.5) == [10] * 4


def test_an_update_in_pieces_requires_weights_in_flight():
    ahead = plan(old=False, streams=True, max_staleness=1)
    # Every second rollout would end in the midst of an update, and wait for its end.
    assert sum(steady(ahead, rollout=5, update=4)) > 45
    assert steady(replace(ahead, in_flight=True), rollout=5, update=4) == [10] * 4


def test_an_update_in_pieces_hides_all_but_its_last_piece_where_samples_are_of_the_newest_weights():
    assert steady(plan(old=False), rollout=5, update=4) == [10 + 8 + 1] * 4
    assert steady(plan(old=False, streams=True), rollout=5, update=4) == [10 + 4 + 1] * 4
