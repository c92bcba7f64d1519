"""A run's own seconds as costs: simulated by them, it takes as long as it did."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_parts import ONE_RANK, executor, task

from dagrl.config.residency import Residency
from dagrl.config.schema import Scope
from dagrl.planner.simulation.costs import CostTable, measured_costs
from dagrl.planner.simulation.simulate import simulate
from dagrl.scheduler.commands import Restart, Run, Sleep, Sync
from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import HOST, Executor, Plan, WorkerId

SECONDS = CostTable({"rollout": 3.0, "reward": 1.0, "update": 2.0}, sync=1.0, sleep=0.5, wake=0.25, save=8.0)


def plan(**settings) -> Plan:
    executors = [
        Executor(HOST, None, ONE_RANK * 2),
        executor("actor", "gpus", trained=True, sleeps=True),
        executor("generator", "gpus", weights_from="actor", sleeps=True),
    ]
    tasks = (
        task("prompts", HOST, scope=Scope.BATCH),
        task("rollout", "generator", "prompts", streams=True, generates=True),
        task("reward", HOST, "rollout"),
        task("update", "actor", "reward", scope=Scope.BATCH, trains=True),
    )
    return Plan(
        {each.name: each for each in executors}, tasks, **{"shards": 2, "steps": 9, "save_every": 2, **settings}
    )


@pytest.mark.parametrize("pieces", [(), ((0,), (1,))])
def test_a_simulation_is_reproduced_from_its_own_activities(pieces):
    planned = plan()
    tasks = tuple(replace(each, pieces=pieces) if each.trains else each for each in planned.tasks)
    planned = replace(planned, tasks=tasks)
    first = simulate(planned, SECONDS, 4)
    again = simulate(planned, measured_costs(planned, first.activities), 4)
    assert again.step_seconds == pytest.approx(first.step_seconds)


def test_a_runs_own_seconds_are_those_of_all_its_rounds():
    filtered = [replace(each, in_rounds=not each.trains) for each in plan().tasks] + [
        task("keep", HOST, "reward", scope=Scope.BATCH, in_rounds=True, selects=True)
    ]
    planned = plan(expected_rounds=3)
    planned = replace(planned, tasks=tuple(filtered))
    first = simulate(planned, SECONDS, 4)
    again = simulate(planned, measured_costs(planned, first.activities), 4)
    assert again.step_seconds == pytest.approx(first.step_seconds)
    assert first.step_seconds[2] > 3 * 6


def test_a_slow_first_step_and_unmeasured_work_do_not_count():
    first = simulate(plan(), SECONDS, 3)
    slow = [
        each._replace(end=each.end + 100) if (each.step, each.name) == (1, "update") else each
        for each in first.activities
    ]
    costs = measured_costs(plan(), slow)
    assert costs.seconds(Run(1, "update", (0, 1))) == pytest.approx(4.0)
    assert costs.seconds(Sleep(1, "actor", Residency.ASLEEP)) == pytest.approx(0.5)
    assert costs.seconds(Sync(1, "generator", "actor", 0)) == pytest.approx(1.0)
    assert costs.seconds(Restart(1, "generator")) == 0.0


def test_servers_share_the_time_of_a_rollout_and_each_worker_of_the_host_has_its_own():
    planned = plan()
    began = [("rollout", 0.0, 4.0), ("rollout", 0.0, 6.0), ("reward", 6.0, 7.0), ("reward", 6.0, 8.0)]
    activities = [Activity(name, name, start, end, 1, None, "", WorkerId("", 0)) for name, start, end in began]
    costs = measured_costs(planned, activities)
    assert costs.seconds(Run(1, "rollout", (0, 1))) == pytest.approx(6.0)
    assert costs.seconds(Run(1, "reward", (0, 1))) == pytest.approx(1.0 + 2.0)
