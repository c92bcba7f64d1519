"""The scheduler as a table of events and commands: no Ray, no clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.config.coordinates import Coordinates
from dagrl.config.residency import Residency
from dagrl.config.schema import Scope
from dagrl.scheduler.commands import (
    Command,
    CommandDone,
    Commit,
    Event,
    LastStep,
    Restart,
    Run,
    Save,
    ShardDone,
    Sleep,
    StopRequested,
    Sync,
    Wake,
)
from dagrl.scheduler.plan import HOST, Executor, Plan, PlannedTask, Rows
from dagrl.scheduler.scheduler import Scheduler

ONE_RANK = (Coordinates(0, 0, 0, 0, primary=True),)
ALL = (0, 1)


def reads(**columns: str) -> dict[str, tuple[str, str]]:
    return {column: (task, column) for column, task in columns.items()}


def diamond(*, groups: tuple[str, str] = ("train", "rollout"), **settings) -> Plan:
    """rollout -> {reward, ref} -> advantage -> update, with a reference on ranks of its own, in two shards."""
    executors = {
        HOST: Executor(HOST, None, ONE_RANK * 2),
        "actor": Executor("actor", groups[0], ONE_RANK, ("actor",), trained=True),
        "reference": Executor("reference", "third", ONE_RANK, ("reference",)),
        "generator": Executor("generator", groups[1], ONE_RANK, ("generator",), weights_from="actor"),
    }
    train = [
        PlannedTask("prompts", "prompts", "prompts", HOST, Scope.BATCH, Rows.TRAIN),
        PlannedTask(
            "rollout",
            "rollout",
            "rollout",
            "generator",
            Scope.ROW,
            Rows.TRAIN,
            engine="generator",
            inputs=reads(prompt_tokens="prompts"),
            streams=True,
            generates=True,
        ),
        PlannedTask("reward", "reward", "reward", HOST, Scope.ROW, Rows.TRAIN, inputs=reads(response_tokens="rollout")),
        PlannedTask(
            "ref",
            "ref",
            "logprob",
            "reference",
            Scope.ROW,
            Rows.TRAIN,
            engine="reference",
            inputs=reads(response_tokens="rollout"),
            frozen=True,
        ),
        PlannedTask(
            "advantage",
            "advantage",
            "advantage",
            HOST,
            Scope.GROUP,
            Rows.TRAIN,
            inputs=reads(reward="reward", ref_logprob="ref"),
        ),
        PlannedTask(
            "update",
            "update",
            "update",
            "actor",
            Scope.BATCH,
            Rows.TRAIN,
            engine="actor",
            inputs=reads(advantage="advantage"),
            trains=True,
        ),
    ]
    validation = [
        replace(train[0], name="val/prompts", rows=Rows.VALIDATION),
        replace(train[1], name="val/rollout", rows=Rows.VALIDATION, inputs=reads(prompt_tokens="val/prompts")),
    ]
    return Plan(executors, (*train, *validation), shards=2, **{"steps": 2, **settings})


def done(step: int, task: str, shards: tuple[int, ...] = ALL) -> CommandDone:
    return CommandDone(Run(step, task, shards))


def test_a_synchronous_step_from_its_prompts_to_its_commit():
    scheduler = Scheduler(diamond(steps=1))
    sync = Sync(1, "generator", "actor", 0)
    assert scheduler.start() == [sync, Run(1, "prompts", ALL)]
    table: list[tuple[Event, list[Command]]] = [
        (done(1, "prompts"), [Run(1, "rollout", ALL)]),
        (CommandDone(sync), []),
        (ShardDone(1, "rollout", 0), [Run(1, "ref", (0,)), Run(1, "reward", (0,))]),
        (done(1, "reward", (0,)), []),
        (done(1, "ref", (0,)), [Run(1, "advantage", (0,))]),
        (ShardDone(1, "rollout", 1), [Run(1, "ref", (1,)), Run(1, "reward", (1,))]),
        (done(1, "rollout"), []),
        (done(1, "advantage", (0,)), []),
        (done(1, "ref", (1,)), []),
        (done(1, "reward", (1,)), [Run(1, "advantage", (1,))]),
        (done(1, "advantage", (1,)), [Run(1, "update", ALL)]),
        (done(1, "update"), [Save(1, "actor")]),
        (CommandDone(Save(1, "actor")), [Commit(1, save=True)]),
        (CommandDone(Commit(1, save=True)), []),
    ]
    for event, expected in table:
        assert scheduler.handle(event) == expected, event
    assert scheduler.finished
    assert scheduler.version("actor") == 1


def test_the_two_branches_of_a_diamond_start_together_and_are_joined():
    scheduler = Scheduler(diamond())
    run_until(scheduler, lambda commands: Run(1, "rollout", ALL) in commands)
    started = scheduler.handle(done(1, "rollout"))
    assert {(command.task, command.shards) for command in started} == {
        ("reward", (0,)),
        ("reward", (1,)),
        ("ref", (0, 1)),  # an engine takes all that there is at once
    }
    assert scheduler.handle(done(1, "reward", (0,))) == []


def test_engines_of_one_group_take_turns():
    plan = diamond(groups=("shared", "shared"), max_staleness=1)
    scheduler = Scheduler(plan)
    running: set[str] = set()
    for command, event in play(scheduler):
        if isinstance(command, Run) and (executor := plan.task(command.task).executor) in ("actor", "generator"):
            if event is None:
                assert not running
                running.add(executor)
            elif isinstance(event, CommandDone):
                running.remove(executor)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_samples_are_never_staler_than_the_bound(staleness):
    scheduler = Scheduler(diamond(steps=6, max_staleness=staleness))
    versions = {}
    for command, event in play(scheduler):
        if isinstance(command, Run) and command.task == "rollout" and event is not None:
            versions[command.step] = scheduler.version("generator")
        if isinstance(command, Run) and command.task == "update" and event is None:
            assert scheduler.version("actor") == command.step - 1
            assert command.step - 1 - versions[command.step] <= staleness
    assert set(versions) == set(range(1, 7))


def test_rollout_of_the_next_step_runs_beside_the_update_where_staleness_allows_it():
    scheduler = Scheduler(diamond(max_staleness=1))
    started: set[tuple[int, str]] = set()
    run_until(scheduler, lambda commands: any(isinstance(c, Run) and c.task == "update" for c in commands), started)
    assert (2, "rollout") in started


def test_validation_runs_on_the_weights_of_its_step_and_belongs_to_its_commit():
    scheduler = Scheduler(diamond(steps=2, validate_every=2, validate_first=True))
    seen, commits = [], []
    for command, event in play(scheduler):
        if isinstance(command, Run) and command.task == "val/rollout" and event is not None:
            seen.append((command.step, scheduler.version("generator")))
        if isinstance(command, Commit) and event is not None:
            commits.append(command.step)
    assert seen == [(0, 0), (2, 2)]
    assert commits == [0, 1, 2]


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("last", [1, 3, 4])
def test_the_step_that_reads_the_last_prompts_is_the_last_one_and_saved(staleness: int, last: int):
    scheduler = Scheduler(diamond(steps=9, max_staleness=staleness))
    begun, pending = [], scheduler.start()
    while pending:
        command = pending.pop(0)
        begun.append(command)
        ended = [CommandDone(command)]
        if isinstance(command, Run) and (command.step, command.task) == (last, "prompts"):
            ended.insert(0, LastStep(last))
        pending += scheduler.handle(*ended)
    assert [command.step for command in begun if isinstance(command, Run) and command.task == "update"] == [
        *range(1, last + 1)
    ]
    assert max(command.step for command in begun) == last
    assert [command for command in begun if isinstance(command, Save)] == [Save(last, "actor")]
    assert begun[-1] == Commit(last, True)
    assert scheduler.finished
    assert scheduler.last_step == scheduler.committed == last


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("stop", [False, True])
def test_a_validation_alone_has_one_step_on_the_weights_of_the_checkpoint(step: int, stop: bool):
    plan = diamond(steps=step, only_validates=True)
    actor = replace(plan.executors["actor"], trained=False)
    tasks = tuple(task for task in plan.tasks if task.rows is Rows.VALIDATION)
    scheduler = Scheduler(replace(plan, executors={**plan.executors, "actor": actor}, tasks=tasks), first_step=step + 1)
    begun = []
    commands = scheduler.start()
    if stop:
        commands += scheduler.handle(StopRequested())
    while commands:
        begun += commands
        commands = [each for command in commands for each in scheduler.handle(CommandDone(command))]
    assert [type(command) for command in begun if not isinstance(command, Run)] == [Sync, Commit]
    assert begun[-1] == Commit(step, False)
    assert [run.task for run in begun if isinstance(run, Run)] == ["val/prompts", "val/rollout"]
    assert scheduler.version("generator") == step
    assert scheduler.finished


def test_a_save_keeps_the_trainer_and_holds_the_next_update_up():
    scheduler = Scheduler(diamond(steps=3, save_every=1, max_staleness=1))
    saving, saved = False, []
    for command, event in play(scheduler):
        if isinstance(command, Save):
            saving = event is None
            if saving:
                saved.append((command, scheduler.version("actor")))
        if isinstance(command, Run) and command.task == "update" and event is None:
            assert not saving
            assert scheduler.committed >= command.step - 1
    assert saved == [(Save(step, "actor"), step) for step in (1, 2, 3)]


def test_the_next_step_is_being_sampled_while_one_is_being_saved():
    scheduler = Scheduler(diamond(steps=2, save_every=1))
    pending = run_until(scheduler, lambda commands: Run(1, "update", ALL) in commands)
    assert pending == [Run(1, "update", ALL), Run(2, "prompts", ALL)]
    sync = Sync(2, "generator", "actor", 1)
    assert scheduler.handle(done(2, "prompts")) == [sync, Run(2, "rollout", ALL)]
    assert scheduler.handle(done(1, "update")) == []
    assert scheduler.handle(CommandDone(sync)) == [Save(1, "actor")]


def test_in_one_group_a_save_comes_before_the_next_step_and_that_makes_room_while_its_prompts_are_read():
    plan = diamond(groups=("shared", "shared"), steps=2, save_every=1)
    sleepers = {name: replace(each, sleeps=each.group == "shared") for name, each in plan.executors.items()}
    scheduler = Scheduler(replace(plan, executors=sleepers))
    pending = run_until(scheduler, lambda commands: Run(1, "update", ALL) in commands)
    assert pending == [Run(1, "update", ALL), Run(2, "prompts", ALL)]
    assert scheduler.handle(done(1, "update")) == [Save(1, "actor")]
    assert scheduler.handle(CommandDone(Save(1, "actor"))) == [
        Commit(1, save=True),
        Sleep(2, "actor", Residency.WEIGHTS),
    ]


def test_going_on_after_a_checkpoint_starts_with_the_next_step_and_its_weights():
    scheduler = Scheduler(diamond(steps=5, validate_first=True), first_step=4)
    assert scheduler.start() == [Sync(4, "generator", "actor", 3), Run(4, "prompts", ALL)]


def test_a_stop_finishes_the_step_saves_it_and_starts_no_other():
    scheduler = Scheduler(diamond(steps=9, max_staleness=1))
    commands = run_until(scheduler, lambda commands: any(isinstance(c, Run) and c.step == 2 for c in commands))
    pending = [*commands, *scheduler.handle(StopRequested())]
    steps = set()
    while not scheduler.finished:
        command = pending.pop(0)
        if isinstance(command, Run) and command.task == "update":
            steps.add(command.step)
        if isinstance(command, Commit):
            assert command.save
        pending += scheduler.handle(CommandDone(command))
    assert steps <= {1, 2}
    assert scheduler.committed < 3


def test_a_stop_during_an_unsaved_commit_saves_the_step_after_it():
    scheduler = Scheduler(diamond(steps=9))
    commands = run_until(scheduler, lambda commands: Commit(1, save=False) in commands)
    assert Run(2, "prompts", ALL) in commands or Run(2, "prompts", ALL) in scheduler.handle(
        CommandDone(Commit(1, save=False))
    )


def test_a_step_is_not_trained_before_the_validation_of_the_start_is_committed():
    """Two commits under way at once could end in either order."""
    scheduler = Scheduler(diamond(max_staleness=2, validate_first=True))
    assert scheduler.committed == -1, "what the start's validation makes is still needed"
    pending, seen = scheduler.start(), []
    while pending and pending != [Commit(0, save=False)]:
        command = next(each for each in pending if each != Commit(0, save=False))
        pending.remove(command)
        seen.append(command)
        pending += scheduler.handle(CommandDone(command))
    assert Run(1, "advantage", (1,)) in seen and Run(1, "update", ALL) not in seen
    assert Run(1, "update", ALL) in scheduler.handle(CommandDone(Commit(0, save=False)))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whatever_finishes_first_every_step_is_done_once_and_nothing_stalls(data):
    plan = diamond(
        groups=data.draw(st.sampled_from([("train", "rollout"), ("one", "one")])),
        steps=data.draw(st.integers(1, 4)),
        max_staleness=data.draw(st.integers(0, 2)),
        validate_every=data.draw(st.sampled_from([None, 1, 2])),
        validate_first=data.draw(st.booleans()),
        save_every=data.draw(st.sampled_from([None, 1, 2])),
    )
    scheduler = Scheduler(plan)
    pending, runs, commits = scheduler.start(), [], []
    for _ in range(2000):
        if scheduler.finished:
            break
        assert pending, "nothing is running and nothing may start: a deadlock"
        command = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
        if isinstance(command, Run):
            runs += [(command.step, command.task, shard) for shard in command.shards]
        if isinstance(command, Commit):
            commits.append(command.step)
        pending += scheduler.handle(CommandDone(command))
    assert scheduler.finished
    first = 0 if plan.validate_first else 1
    expected = [
        (step, task.name, shard)
        for step in range(first, plan.steps + 1)
        for task in plan.tasks_of(step)
        for shard in range(plan.shards)
    ]
    assert sorted(runs) == sorted(expected)
    assert commits == list(range(first, plan.steps + 1))


def play(scheduler: Scheduler):
    """Carry out all commands in the order they come; yields (command, None) at its start and (command, event) after."""
    pending = scheduler.start()
    for command in pending:
        yield command, None
    while not scheduler.finished:
        command = pending.pop(0)
        assert not isinstance(command, Sleep | Wake | Restart), "nobody sleeps in these plans"
        started = scheduler.handle(CommandDone(command))
        yield command, CommandDone(command)
        for each in started:
            yield each, None
        pending += started


def run_until(scheduler: Scheduler, reached, started: set | None = None) -> list[Command]:
    """Carry out commands, oldest first, until `reached` is true of those not yet carried out; these are returned."""
    pending = scheduler.start()
    while not reached(pending):
        if started is not None:
            started.update((c.step, c.task) for c in pending if isinstance(c, Run))
        command = pending.pop(0)
        pending += scheduler.handle(CommandDone(command))
    if started is not None:
        started.update((c.step, c.task) for c in pending if isinstance(c, Run))
    return pending
