"""Engines of one group take turns in memory: who moves when, and who starts before whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_parts import ONE_RANK, executor, for_validation, task

from dagrl.config.residency import Residency
from dagrl.config.schema import Scope
from dagrl.scheduler.commands import (
    Command,
    CommandDone,
    Commit,
    Run,
    Save,
    ShardDone,
    Sleep,
    StopRequested,
    Sync,
    Wake,
)
from dagrl.scheduler.plan import HOST, Executor, Plan
from dagrl.scheduler.scheduler import Scheduler
from dagrl.scheduler.time_sharing import residency_after_start, start_chains

ASLEEP, WEIGHTS, AWAKE = Residency.ASLEEP, Residency.WEIGHTS, Residency.AWAKE
ALL = (0, 1)


def colocated(*, reference: str | None = None, sleepers=("actor", "reference", "generator"), **settings) -> Plan:
    """GRPO with actor and generator on group ``gpus``, and a reference on `reference`, if that is a group."""
    executors = [
        executor("actor", "gpus", trained=True, sleeps="actor" in sleepers),
        executor("generator", "gpus", weights_from="actor", sleeps="generator" in sleepers),
    ]
    tasks = [
        task("prompts", HOST, scope=Scope.BATCH),
        task("rollout", "generator", "prompts", streams=True, generates=True),
        task("reward", HOST, "rollout"),
        task("update", "actor", "reward", scope=Scope.BATCH, trains=True),
    ]
    if reference:
        executors.append(executor("reference", reference, sleeps="reference" in sleepers))
        tasks.insert(3, task("ref", "reference", "rollout", frozen=True))
        tasks[-1] = task("update", "actor", "reward", "ref", scope=Scope.BATCH, trains=True)
    validation = for_validation(tasks, "prompts", "rollout", "reward")
    everyone = {HOST: Executor(HOST, None, ONE_RANK * 2), **{each.name: each for each in executors}}
    return Plan(everyone, (*tasks, *validation), shards=2, **{"steps": 2, **settings})


def played(scheduler: Scheduler) -> list[Command]:
    """All commands to the end, where each is over before the next begins."""
    pending, begun = scheduler.start(), []
    while not scheduler.finished:
        command = pending.pop(0)
        begun.append(command)
        pending += scheduler.handle(CommandDone(command))
    return begun


def on_engines(commands: list[Command]) -> list[Command]:
    return [each for each in commands if not isinstance(each, Commit) and getattr(each, "task", "") not in HOST_TASKS]


HOST_TASKS = ("prompts", "reward", "val/prompts", "val/reward")


def test_a_colocated_sync_needs_only_the_weights_of_both_engines():
    first, second = (
        [
            Sleep(step, "actor", WEIGHTS),
            Wake(step, "generator", WEIGHTS),
            Sync(step, "generator", "actor", step - 1),
            Sleep(step, "actor", ASLEEP),
            Wake(step, "generator", AWAKE),
            Run(step, "rollout", ALL),
            Sleep(step, "generator", ASLEEP),
            Wake(step, "actor", AWAKE),
            Run(step, "update", ALL),
        ]
        for step in (1, 2)
    )
    assert on_engines(played(Scheduler(colocated()))) == [*first, *second, Save(2, "actor")]


def test_an_engine_that_has_been_trained_is_saved_before_it_sleeps():
    commands = on_engines(played(Scheduler(colocated(steps=2, save_every=1, validate_every=1))))
    update = commands.index(Run(1, "update", ALL))
    assert commands[update + 1 : update + 8] == [
        Save(1, "actor"),
        Sleep(1, "actor", WEIGHTS),
        Wake(1, "generator", WEIGHTS),
        Sync(1, "generator", "actor", 1),
        Sleep(1, "actor", ASLEEP),
        Wake(1, "generator", AWAKE),
        Run(1, "val/rollout", ALL),
    ]
    # The next rollout is on the same weights: nobody moves.
    assert commands[update + 8] == Run(2, "rollout", ALL)


def test_engines_of_one_group_that_work_one_after_the_other_move_once():
    commands = on_engines(played(Scheduler(colocated(reference="gpus", steps=1))))
    rollout = commands.index(Run(1, "rollout", ALL))
    assert commands[rollout + 1 :] == [
        Sleep(1, "generator", ASLEEP),
        Wake(1, "reference", AWAKE),
        Run(1, "ref", (0,)),
        Run(1, "ref", (1,)),
        Sleep(1, "reference", ASLEEP),
        Wake(1, "actor", AWAKE),
        Run(1, "update", ALL),
        Save(1, "actor"),
    ]


def test_the_first_engine_in_the_step_gets_free_memory():
    plan = colocated(reference="gpus", steps=1)
    old = task("old", "actor", "rollout")
    for order in ("ref", "old"), ("old", "ref"):
        between = sorted([old, plan.task("ref")], key=lambda each: order.index(each.name))
        tasks = [each for each in plan.tasks if each.name != "ref"]
        tasks[3:3] = between
        commands = on_engines(played(Scheduler(replace(plan, tasks=tuple(tasks)))))
        scored = [each.task for each in commands if isinstance(each, Run) and each.task in order]
        assert scored == [order[0]] * 2 + [order[1]] * 2


def test_a_single_sleeper_leaves_while_its_neighbours_work():
    commands = on_engines(played(Scheduler(colocated(steps=1, sleepers=("actor",)))))
    assert commands == [
        Sleep(1, "actor", WEIGHTS),
        Sync(1, "generator", "actor", 0),
        Sleep(1, "actor", ASLEEP),
        Run(1, "rollout", ALL),
        Wake(1, "actor", AWAKE),
        Run(1, "update", ALL),
        Save(1, "actor"),
    ]


def test_without_sleep_no_engine_moves():
    commands = played(Scheduler(colocated(sleepers=(), validate_every=1, save_every=1)))
    assert not any(isinstance(each, Sleep | Wake) for each in commands)


def test_a_sync_to_another_group_moves_no_engine():
    """Actor and reference share a group, the generator has its own: only who stands in the way moves."""
    plan = colocated(reference="gpus", steps=2)
    generator = executor("generator", "others", weights_from="actor")
    plan = replace(plan, executors={**plan.executors, "generator": generator})
    commands = on_engines(played(Scheduler(plan)))
    turn = [
        lambda step: Sync(step, "generator", "actor", step - 1),
        lambda step: Run(step, "rollout", ALL),
        lambda step: Sleep(step, "actor", ASLEEP),
        lambda step: Wake(step, "reference", AWAKE),
        lambda step: Run(step, "ref", (0,)),
        lambda step: Run(step, "ref", (1,)),
        lambda step: Sleep(step, "reference", ASLEEP),
        lambda step: Wake(step, "actor", AWAKE),
        lambda step: Run(step, "update", ALL),
    ]
    assert commands == [*(each(step) for step in (1, 2) for each in turn), Save(2, "actor")]


def test_weights_that_are_new_enough_are_not_worth_a_move():
    """Rollout 3 may use the first weights, and the actor, which has newer ones, sleeps while the reference works."""
    plan = colocated(reference="gpus", steps=3, max_staleness=2)
    generator = executor("generator", "others", weights_from="actor")
    scheduler = Scheduler(replace(plan, executors={**plan.executors, "generator": generator}))
    pending = scheduler.start()
    second, last_ref = Run(2, "rollout", ALL), Run(2, "ref", (1,))
    slow = (second, Run(2, "reward", (0,)), Run(2, "reward", (1,)))

    def go_on_until(reached) -> None:
        while not reached():
            pending.sort(key=lambda command: command in slow)
            pending.extend(scheduler.handle(CommandDone(pending.pop(0))))

    go_on_until(lambda: scheduler.version("actor") == 1 and pending[:1] == [second])
    for shard in ALL:
        pending += scheduler.handle(ShardDone(2, "rollout", shard))
    go_on_until(lambda: last_ref in pending)
    go_on_until(lambda: set(pending) == set(slow))
    assert (scheduler.residency("reference"), scheduler.residency("actor")) == (AWAKE, ASLEEP)
    assert Run(3, "rollout", ALL) in scheduler.handle(CommandDone(second))


def test_a_stop_wakes_the_trainer_once_more_to_save_it():
    scheduler = Scheduler(colocated(steps=9, validate_every=1))
    pending, begun = scheduler.start(), []
    while Run(1, "val/rollout", ALL) not in pending:
        pending += scheduler.handle(CommandDone(pending.pop(0)))
    pending += scheduler.handle(StopRequested())
    while not scheduler.finished:
        begun.append(pending.pop(0))
        pending += scheduler.handle(CommandDone(begun[-1]))
    assert on_engines(begun) == [
        Run(1, "val/rollout", ALL),
        Sleep(1, "generator", ASLEEP),
        Wake(1, "actor", AWAKE),
        Save(1, "actor"),
    ]
    assert begun[-1] == Commit(1, save=True)


def test_a_stop_saves_an_engine_that_is_free_at_once():
    scheduler = Scheduler(colocated(steps=9, validate_every=1, sleepers=()))
    last = [Run(1, "val/reward", (shard,)) for shard in ALL]
    pending = scheduler.start()
    while pending != last:
        pending.sort(key=lambda command: command in last)
        pending += scheduler.handle(CommandDone(pending.pop(0)))
    assert scheduler.handle(StopRequested()) == [Save(1, "actor")]


def test_a_younger_step_displaces_no_engine_with_work_of_an_older_one():
    """Where a step may be stale, rollout 3 could begin while update 2 waits for nothing but the commit of step 1."""
    scheduler = Scheduler(colocated(max_staleness=1, steps=4))
    pending, begun = scheduler.start(), []
    while not scheduler.finished:
        pending.sort(key=lambda command: isinstance(command, Commit))
        begun.append(pending.pop(0))
        pending += scheduler.handle(CommandDone(begun[-1]))
    commands = on_engines(begun)
    turns = [each.task for each in commands if isinstance(each, Run)]
    assert turns == ["rollout", "rollout", "update", "update", "rollout", "rollout", "update", "update"]
    assert sum(isinstance(each, Sleep) and each.executor == "generator" for each in commands) == 2


def test_a_stale_step_uses_the_time_in_which_an_older_one_waits_for_its_rewards():
    scheduler = Scheduler(colocated(max_staleness=1, steps=3))
    pending, begun = scheduler.start(), []
    while not scheduler.finished:
        pending.sort(key=lambda command: isinstance(command, Run) and command.task == "reward" and command.step == 2)
        begun.append(pending.pop(0))
        pending += scheduler.handle(CommandDone(begun[-1]))
    turns = [each.task for each in on_engines(begun) if isinstance(each, Run)]
    assert turns == ["rollout", "rollout", "update", "rollout", "update", "update"]


# -- judges that follow the policy


def judged_on(engine: str, **settings) -> Plan:
    """Rewards are what an engine says: the policy's generator, or servers of its own that follow the policy too."""
    plan = colocated(**settings)
    servers = {"judges": executor("judges", "gpus", weights_from="actor", sleeps=True, are_servers=True)}
    tasks = [replace(each, executor=engine) if each.node == "reward" else each for each in plan.tasks]
    return replace(plan, executors=plan.executors | (servers if engine == "judges" else {}), tasks=tuple(tasks))


def test_a_policy_judges_itself_with_the_weights_that_it_has_sampled_with():
    commands = [each for each in played(Scheduler(judged_on("generator", steps=1))) if not isinstance(each, Commit)]
    rollout = commands.index(Run(1, "rollout", ALL))
    # Nobody moves in between.
    assert commands[rollout + 1 :] == [
        *(Run(1, "reward", (shard,)) for shard in ALL),
        Sleep(1, "generator", ASLEEP),
        Wake(1, "actor", AWAKE),
        Run(1, "update", ALL),
        Save(1, "actor"),
    ]


def test_a_judge_that_follows_gets_its_weights_as_a_generator_does():
    commands = [each for each in played(Scheduler(judged_on("judges", steps=1))) if not isinstance(each, Commit)]
    rollout = commands.index(Run(1, "rollout", ALL))
    assert commands[rollout + 1 :] == [
        Sleep(1, "generator", ASLEEP),
        Wake(1, "actor", WEIGHTS),
        Wake(1, "judges", WEIGHTS),
        Sync(1, "judges", "actor", 0),
        Sleep(1, "actor", ASLEEP),
        Wake(1, "judges", AWAKE),
        *(Run(1, "reward", (shard,)) for shard in ALL),
        Sleep(1, "judges", ASLEEP),
        Wake(1, "actor", AWAKE),
        Run(1, "update", ALL),
        Save(1, "actor"),
    ]


# -- who starts before whom


def test_servers_start_before_engines_that_do_not_measure_free_memory():
    plan = judged_on("judges", reference="gpus")
    (chain,) = [chain for chain in start_chains(plan) if chain != (HOST,)]
    assert chain == ("generator", "judges", "reference", "actor")


def test_a_generator_starts_first_and_the_source_of_its_weights_last():
    plan = colocated(reference="gpus")
    (chain,) = [chain for chain in start_chains(plan) if chain != (HOST,)]
    assert chain == ("generator", "reference", "actor")
    left = [residency_after_start(plan.executors[name], chain) for name in chain]
    assert left == [ASLEEP, ASLEEP, AWAKE]


def test_engines_with_groups_of_their_own_start_at_once_and_awake():
    plan = colocated(reference="others")
    assert set(start_chains(plan)) == {(HOST,), ("generator", "actor"), ("reference",)}
    assert Scheduler(plan).residency("reference") is AWAKE


@pytest.mark.parametrize(
    ("on_gpus", "chains"), [(True, {("generator", "actor")}), (False, {("actor",), ("generator",)})]
)
def test_engines_that_stay_where_they_are_start_in_order_on_gpus_only(on_gpus, chains):
    """What a generator takes of a GPU's memory must not depend on how far its neighbour has got."""
    plan = colocated(sleepers=())
    executors = {name: replace(each, on_gpus=on_gpus and name != HOST) for name, each in plan.executors.items()}
    assert set(start_chains(replace(plan, executors=executors))) == {(HOST,), *chains}
