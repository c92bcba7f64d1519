"""A run as the scheduler would have it, in seconds that a table says."""

from __future__ import annotations

from dataclasses import replace

from plan_parts import ONE_RANK, executor, task

from dagrl.config.schema import Scope
from dagrl.planner.simulation.costs import CostTable
from dagrl.planner.simulation.simulate import Simulated, simulate
from dagrl.scheduler.intervals import busy_seconds
from dagrl.scheduler.plan import HOST, Executor, Plan

SECONDS = CostTable({"rollout": 3.0, "reward": 1.0, "update": 2.0}, sync=1.0, sleep=0.5, wake=0.25, save=8.0)


def grpo(*groups: str, sleeps: bool = False, **settings) -> Plan:
    trained, sampled = groups
    executors = [
        Executor(HOST, None, ONE_RANK * 2),
        executor("actor", trained, trained=True, sleeps=sleeps),
        executor("generator", sampled, weights_from="actor", sleeps=sleeps),
    ]
    tasks = (
        task("prompts", HOST, scope=Scope.BATCH),
        task("rollout", "generator", "prompts", streams=True, generates=True),
        task("reward", HOST, "rollout"),
        task("update", "actor", "reward", scope=Scope.BATCH, trains=True),
    )
    return Plan({each.name: each for each in executors}, tasks, **{"shards": 2, "steps": 9, **settings})


def spans(simulated: Simulated, name: str, step: int = 1) -> list[tuple[float, float]]:
    return [(each.start, each.end) for each in simulated.activities if (each.name, each.step) == (name, step)]


def test_a_synchronous_step_is_its_longest_way():
    simulated = simulate(grpo("train", "rollout"), SECONDS, 2)
    # Sync, two shards of 3 s one after the other, the reward of the second, and an update of two shards.
    assert simulated.step_seconds == {1: 12.0, 2: 12.0}
    assert simulated.seconds == 24.0
    assert spans(simulated, "sync") == [(0.0, 1.0)]
    assert spans(simulated, "rollout") == [(1.0, 4.0), (4.0, 7.0)]
    assert spans(simulated, "reward") == [(4.0, 5.0), (7.0, 8.0)]
    assert spans(simulated, "update") == [(8.0, 12.0)]
    assert [each.shard for each in simulated.activities if each.name == "rollout"] == [0, 1, 0, 1]
    assert {(each.category, each.executor, each.group) for each in simulated.activities if each.name == "sync"} == {
        ("sync", "generator", "rollout")
    }


def test_moves_of_a_group_in_turns_take_their_time():
    simulated = simulate(grpo("gpus", "gpus", sleeps=True), SECONDS, 1)
    moves = [(each.name, each.executor, each.start, each.end) for each in simulated.activities if each.shard is None]
    assert moves[:9] == [
        ("prompts", HOST, 0.0, 0.0),
        ("sleep", "actor", 0.0, 0.5),
        ("wake", "generator", 0.5, 0.75),
        ("sync", "generator", 0.75, 1.75),
        ("sleep", "actor", 1.75, 2.25),
        ("wake", "generator", 2.25, 2.5),
        ("sleep", "generator", 9.5, 10.0),
        ("wake", "actor", 10.0, 10.25),
        # The next step's, while nothing but the update is left of this one.
        ("prompts", HOST, 10.25, 10.25),
    ]
    assert moves[9:10] == [("update", "actor", 10.25, 14.25)]
    # Nobody moves before the last reward is there.
    assert busy_seconds(each for each in simulated.activities if each.group == "gpus") == 14.25 - 1


def test_with_staleness_a_step_takes_as_long_as_its_slower_side():
    simulated = simulate(grpo("train", "rollout", max_staleness=1), SECONDS, 6)
    assert [simulated.step_seconds[step] for step in (4, 5, 6)] == [7.0] * 3
    # What had begun and not ended when step 6 was committed is told apart.
    assert not spans(simulated, "rollout", 8)
    assert max(each.end for each in simulated.activities) == simulated.seconds
    assert all(each.start < simulated.seconds < each.end for each in simulated.under_way)
    rollouts = [each for each in (*simulated.activities, *simulated.under_way) if each.group == "rollout"]
    assert busy_seconds(rollouts) >= simulated.seconds
    # Six updates; syncs for all steps up to 7 but the second, which goes on with the first weights.
    assert [each.step for each in simulated.activities if each.name == "sync"] == [1, 3, 4, 5, 6, 7]


def test_an_update_in_pieces_begins_while_the_rest_is_being_sampled():
    plan = grpo("train", "rollout")
    tasks = tuple(replace(each, pieces=((0,), (1,))) if each.trains else each for each in plan.tasks)
    simulated = simulate(replace(plan, tasks=tasks), SECONDS, 1)
    assert spans(simulated, "update") == [(5.0, 7.0), (8.0, 10.0)]
    assert simulated.step_seconds == {1: 10.0}


def test_a_save_is_part_of_its_step():
    simulated = simulate(grpo("train", "rollout", save_every=1), SECONDS, 1)
    # The weights go first: the next step is sampled meanwhile.
    assert simulated.step_seconds == {1: 21.0}
    assert spans(simulated, "save") == [(13.0, 21.0)]
    assert spans(simulated, "rollout", 2)[0] == (13.0, 16.0)


def test_the_same_plan_gives_the_same_simulation():
    first, second = (simulate(grpo("train", "rollout", max_staleness=2), SECONDS, 5) for _ in range(2))
    assert first == second
