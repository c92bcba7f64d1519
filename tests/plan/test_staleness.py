"""Generators a step ahead: their weights come before their source goes on, so that neither side waits for the other."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace
from itertools import count, pairwise

import pytest
from plan_parts import ONE_RANK, event_of, executor, task

from dagrl.plan.commands import Command, Run, ShardDone, Sync
from dagrl.plan.plan import HOST, Executor, Plan
from dagrl.plan.scheduler import Scheduler
from dagrl.spec.ops import Scope

ALL = (0, 1)


def plan(**settings) -> Plan:
    """Old log-probs and updates on one engine, rollouts on another, in two shards."""
    executors = [
        Executor(HOST, None, ONE_RANK * 3),
        executor("actor", "train", trained=True),
        executor("generator", "rollout", follows="actor"),
    ]
    tasks = (
        task("prompts", HOST, scope=Scope.BATCH),
        task("rollout", "generator", "prompts", streams=True, generates=True),
        task("reward", HOST, "rollout"),
        task("old", "actor", "rollout"),
        task("update", "actor", "reward", "old", scope=Scope.BATCH, trains=True),
    )
    return Plan({each.name: each for each in executors}, tasks, **{"shards": 2, "steps": 8, **settings})


def played(plan: Plan, seconds: Mapping[str, float]) -> dict[Command, tuple[float, float]]:
    """When each command began and ended, where each takes its `seconds`; a rollout brings its shards evenly."""
    scheduler, now, order = Scheduler(plan), 0.0, count()
    spans: dict[Command, tuple[float, float]] = {}
    coming: list[tuple[float, int, object]] = []
    commands = scheduler.start()
    while not scheduler.finished:
        for command in commands:
            takes = seconds.get(command.task if isinstance(command, Run) else type(command).__name__, 0.0)
            spans[command] = (now, now + takes)
            heapq.heappush(coming, (now + takes, next(order), event_of(command)))
            if isinstance(command, Run) and command.task == "rollout":
                heapq.heappush(coming, (now + takes / 2, next(order), ShardDone(command.step, "rollout", 0)))
        now, _, event = heapq.heappop(coming)
        commands = scheduler.handle(event)
    return spans


def between_commits(spans: Mapping[Command, tuple[float, float]]) -> list[float]:
    """Seconds between the ends of updates."""
    ends = sorted(end for command, (_, end) in spans.items() if isinstance(command, Run) and command.task == "update")
    return [later - earlier for earlier, later in pairwise(ends)]


@pytest.mark.parametrize(
    ("seconds", "a_step"),
    [
        # The slower of the two, and the sync, for which both stand still.
        ({"rollout": 10, "old": 1, "update": 5, "Sync": 1}, 11),
        ({"rollout": 5, "old": 2, "update": 8, "Sync": 1}, 13),
        ({"rollout": 10, "old": 2, "update": 6, "Sync": 1}, 11),
    ],
    ids=["rollouts take longer", "training takes longer", "both take as long"],
)
def test_a_step_takes_as_long_as_the_slower_side(seconds, a_step):
    spans = played(plan(max_staleness=1), seconds)
    assert between_commits(spans)[2:-1] == [a_step] * 4


def test_a_generator_that_is_about_to_begin_gets_its_weights_before_their_source_goes_on():
    spans = played(plan(max_staleness=1), {"rollout": 10, "old": 2, "update": 6, "Sync": 1})
    for step in range(4, 8):
        (sync,) = [span for command, span in spans.items() if isinstance(command, Sync) and command.step == step]
        ended = spans[Run(step - 1, "rollout", ALL)][1]
        assert sync == (ended, ended + 1)
        assert spans[Run(step - 1, "old", (1,))][0] == ended + 1


def test_prompts_come_before_what_older_steps_have_for_the_host():
    scheduler = Scheduler(
        replace(plan(max_staleness=1), executors=plan().executors | {HOST: Executor(HOST, None, ONE_RANK)})
    )
    pending = scheduler.start()
    while (begun := pending.pop(0)) != Run(1, "update", ALL):
        pending += scheduler.handle(event_of(begun))
    # The one worker of the host has rewards of step 2 to compute, and the generator nothing to do.
    (busy,) = [each for each in pending if isinstance(each, Run) and each.task == "reward"]
    assert Run(3, "prompts", ALL) not in scheduler.handle(event_of(begun)), "the worker is taken"
    assert [each for each in scheduler.handle(event_of(busy)) if isinstance(each, Run)] == [Run(3, "prompts", ALL)]


def test_two_steps_ahead_hide_rollouts_that_take_longer_now_and_then():
    assert sum(between_commits(played(plan(max_staleness=2), {"rollout": 10, "old": 1, "update": 5, "Sync": 1}))) <= 77
