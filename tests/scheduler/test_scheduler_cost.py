"""What an event costs the scheduler: lines that it executes, which no busy machine changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from executed_lines import lines_of
from plan_parts import ONE_RANK, executor, task

from dagrl.config.schema import Scope
from dagrl.planner.simulation.costs import CostTable
from dagrl.planner.simulation.simulate import simulate
from dagrl.scheduler.plan import HOST, Executor, Plan

SECONDS = CostTable({"rollout": 1.0, "reward": 3.0, "ref": 1.0, "advantage": 0.1, "update": 1.0})


def plan(shards: int, max_staleness: int) -> Plan:
    executors = [
        Executor(HOST, None, ONE_RANK * 4),
        executor("actor", "train", trained=True),
        executor("generator", "rollout", weights_from="actor"),
        executor("reference", "reference"),
    ]
    tasks = (
        task("prompts", HOST, scope=Scope.BATCH),
        task("rollout", "generator", "prompts", streams=True, generates=True),
        task("reward", HOST, "rollout"),
        task("ref", "reference", "rollout", frozen=True),
        task("advantage", HOST, "reward", "ref", scope=Scope.GROUP),
        task("update", "actor", "advantage", scope=Scope.BATCH, trains=True),
    )
    return Plan({each.name: each for each in executors}, tasks, shards=shards, steps=40, max_staleness=max_staleness)


@pytest.mark.parametrize(
    ("small", "large"), [(plan(20, 0), plan(200, 0)), (plan(40, 1), plan(40, 16))], ids=["shards", "open steps"]
)
def test_an_event_costs_as_much_however_much_is_open(small: Plan, large: Plan):
    def lines_a_shard(of: Plan) -> float:
        steps = of.max_staleness + 3
        return lines_of(lambda: simulate(replace(of, steps=steps), SECONDS, steps)) / (of.shards * steps)

    assert lines_a_shard(large) <= 1.2 * lines_a_shard(small)
