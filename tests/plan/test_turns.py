"""Engines of one group take turns in memory: tables for the plain cases, and what must hold for any plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.plan.commands import (
    Command,
    Commit,
    EngineReady,
    Event,
    Run,
    RunDone,
    Save,
    ShardDone,
    Sleep,
    StateSaved,
    StepCommitted,
    StopRequested,
    Sync,
    Wake,
    WeightsSynced,
)
from dagrl.plan.coordinates import Coordinates
from dagrl.plan.plan import HOST, Executor, Plan, PlannedTask, Rows
from dagrl.plan.scheduler import Scheduler
from dagrl.plan.turns import residency_after_start, start_chains
from dagrl.spec.ops import Scope
from dagrl.spec.residency import Residency

ASLEEP, WEIGHTS, AWAKE = Residency.ASLEEP, Residency.WEIGHTS, Residency.AWAKE
ONE_RANK = (Coordinates(0, 0, 0, 0, primary=True),)
ALL = (0, 1)


def executor(name: str, group: str, **fields) -> Executor:
    return Executor(name, group, ONE_RANK, (name,), **fields)


def task(name: str, executor: str, *reads: str, scope: Scope = Scope.ROW, **fields) -> PlannedTask:
    inputs = {f"from_{need}": (need, need) for need in reads}
    return PlannedTask(name, name, name, executor, scope, Rows.TRAIN, inputs=inputs, **fields)


def for_validation(tasks: list[PlannedTask], *names: str) -> list[PlannedTask]:
    return [
        replace(
            each,
            name=f"val/{each.name}",
            rows=Rows.VALIDATION,
            inputs={column: (f"val/{need}", column) for column, (need, _) in each.inputs.items()},
        )
        for each in tasks
        if each.name in names
    ]


def colocated(*, reference: str | None = None, sleepers=("actor", "reference", "generator"), **settings) -> Plan:
    """GRPO with actor and generator on group ``gpus``, and a reference on `reference`, if that is a group."""
    executors = [
        executor("actor", "gpus", trained=True, sleeps="actor" in sleepers),
        executor("generator", "gpus", follows="actor", sleeps="generator" in sleepers),
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


def event_of(command: Command) -> Event:
    match command:
        case Run():
            return RunDone(command)
        case Sync():
            return WeightsSynced(command)
        case Sleep(_, executor, residency) | Wake(_, executor, residency):
            return EngineReady(executor, residency)
        case Save():
            return StateSaved(command)
        case Commit():
            return StepCommitted(command)


def played(scheduler: Scheduler) -> list[Command]:
    """All commands to the end, where each is over before the next begins."""
    pending, begun = scheduler.start(), []
    while not scheduler.finished:
        command = pending.pop(0)
        begun.append(command)
        pending += scheduler.handle(event_of(command))
    return begun


def on_engines(commands: list[Command]) -> list[Command]:
    return [each for each in commands if not isinstance(each, Commit) and getattr(each, "task", "") not in HOST_TASKS]


HOST_TASKS = ("prompts", "reward", "val/prompts", "val/reward")


def test_a_colocated_step_hands_the_weights_over_with_neither_engine_whole():
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


def test_of_two_engines_that_wait_for_room_the_first_in_the_step_gets_it():
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


def test_where_nobody_sleeps_nothing_moves():
    commands = played(Scheduler(colocated(sleepers=(), validate_every=1, save_every=1)))
    assert not any(isinstance(each, Sleep | Wake) for each in commands)


def test_a_sync_to_another_group_takes_an_engine_as_it_is():
    """Actor and reference share a group, the generator has its own: only who stands in the way moves."""
    plan = colocated(reference="gpus", steps=2)
    generator = executor("generator", "others", follows="actor")
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
    generator = executor("generator", "others", follows="actor")
    scheduler = Scheduler(replace(plan, executors={**plan.executors, "generator": generator}))
    pending = scheduler.start()
    second, last_ref = Run(2, "rollout", ALL), Run(2, "ref", (1,))
    slow = (second, Run(2, "reward", (0,)), Run(2, "reward", (1,)))

    def go_on_until(reached) -> None:
        while not reached():
            pending.sort(key=lambda command: command in slow)
            pending.extend(scheduler.handle(event_of(pending.pop(0))))

    go_on_until(lambda: scheduler.version("actor") == 1 and pending[:1] == [second])
    for shard in ALL:
        pending += scheduler.handle(ShardDone(2, "rollout", shard))
    go_on_until(lambda: last_ref in pending)
    go_on_until(lambda: set(pending) == set(slow))
    assert (scheduler.residency("reference"), scheduler.residency("actor")) == (AWAKE, ASLEEP)
    assert Run(3, "rollout", ALL) in scheduler.handle(RunDone(second))


def test_a_stop_wakes_the_trainer_once_more_to_save_it():
    scheduler = Scheduler(colocated(steps=9, validate_every=1))
    pending, begun = scheduler.start(), []
    while Run(1, "val/rollout", ALL) not in pending:
        pending += scheduler.handle(event_of(pending.pop(0)))
    pending += scheduler.handle(StopRequested())
    while not scheduler.finished:
        begun.append(pending.pop(0))
        pending += scheduler.handle(event_of(begun[-1]))
    assert on_engines(begun) == [
        Run(1, "val/rollout", ALL),
        Sleep(1, "generator", ASLEEP),
        Wake(1, "actor", AWAKE),
        Save(1, "actor"),
    ]
    assert begun[-1] == Commit(1, save=True)


def test_a_younger_step_moves_nobody_away_before_whom_lies_an_older_ones_work():
    """Where a step may be stale, rollout 3 could begin while update 2 waits for nothing but the commit of step 1."""
    scheduler = Scheduler(colocated(max_staleness=1, steps=4))
    pending, begun = scheduler.start(), []
    while not scheduler.finished:
        pending.sort(key=lambda command: isinstance(command, Commit))
        begun.append(pending.pop(0))
        pending += scheduler.handle(event_of(begun[-1]))
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
        pending += scheduler.handle(event_of(begun[-1]))
    turns = [each.task for each in on_engines(begun) if isinstance(each, Run)]
    assert turns == ["rollout", "rollout", "update", "rollout", "update", "update"]


# -- who starts before whom


def test_a_generator_starts_first_and_whoever_is_followed_last():
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


# -- whatever the plan


class Watch:
    """Holds commands and events against what must never be; knows nothing of the scheduler's state."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.task_of = {task.name: task for task in plan.tasks}
        self.residency = dict.fromkeys(plan.executors, AWAKE)
        for chain in start_chains(plan):
            self.residency |= {name: residency_after_start(plan.executors[name], chain) for name in chain}
        self.has_weights = {name: each.follows is None for name, each in plan.executors.items()}
        self.trained = dict.fromkeys(plan.executors, 0)
        self.busy: dict[str, list[Command]] = {name: [] for name in plan.executors}
        self.runs: list[tuple[int, str, int]] = []
        self.saves: set[tuple[int, str]] = set()
        self.commits: list[int] = []
        self.moves = 0

    def begin(self, command: Command) -> None:
        for name in self._workers(command):
            self._is_free(name, command)
            self.busy[name].append(command)
        match command:
            case Run(step, task, shards):
                self.runs += [(step, task, shard) for shard in shards]
                self._may_work(self.task_of[task].executor)
                if self.task_of[task].generates:
                    assert self.has_weights[self.task_of[task].executor], f"{command} without weights"
            case Save(step, name):
                self._may_work(name)
                assert self.trained[name] == step
                assert (step, name) not in self.saves
                self.saves.add((step, name))
            case Sync(_, follower, source, _):
                self._may_sync(follower, source)
            case Sleep(_, name, residency):
                assert residency < self.residency[name] and self.plan.executors[name].sleeps
                self.moves += 1
            case Wake(_, name, residency):
                assert residency > self.residency[name] and self.plan.executors[name].sleeps
                # Only when all others have given back what they must.
                most = ASLEEP if residency is AWAKE else WEIGHTS
                assert all(self.residency[other] <= most for other in self._other_sleepers(name)), command
                assert not any(isinstance(each, Sleep) for each in self._under_way(name)), command
                self.moves += 1
            case Commit(step, save):
                self.commits.append(step)
                trained = {name for name, each in self.plan.executors.items() if each.trained}
                assert not save or {name for saved, name in self.saves if saved == step} == trained

    def end(self, command: Command) -> None:
        for name in self._workers(command):
            self.busy[name].remove(command)
        match command:
            case Run(step, task, _) if self.task_of[task].trains:
                self.trained[self.task_of[task].executor] = step
            case Sync(_, follower, _, _):
                self.has_weights[follower] = True
            case Sleep(_, name, residency) | Wake(_, name, residency):
                self.residency[name] = residency
                if residency is ASLEEP and self.plan.executors[name].follows:
                    self.has_weights[name] = False
        for group in {each.group for each in self.plan.executors.values()}:
            sleepers = [each.name for each in self.plan.executors.values() if each.group == group and each.sleeps]
            held = sorted((self.residency[name] for name in sleepers), reverse=True)
            assert held[:1] != [AWAKE] or not any(held[1:]), f"two of {sleepers} hold {held}"

    def _workers(self, command: Command) -> list[str]:
        match command:
            case Run(_, task, _):
                return [self.task_of[task].executor]
            case Sync(_, follower, source, _):
                return [follower, source]
            case Commit():
                return []
        return [command.executor]

    def _under_way(self, name: str) -> list[Command]:
        group = self.plan.executors[name].group
        return [each for other, busy in self.busy.items() if self.plan.executors[other].group == group for each in busy]

    def _other_sleepers(self, name: str) -> list[str]:
        group = self.plan.executors[name].group
        return [
            each.name
            for each in self.plan.executors.values()
            if each.group == group and each.sleeps and each.name != name
        ]

    def _is_free(self, name: str, command: Command) -> None:
        """A group is for one thing at a time: a task, a save, a sync of its own, or moves for one of them."""
        if name == HOST:
            assert len(self.busy[name]) < self.plan.executors[name].ranks
            return
        assert not self.busy[name], f"{command} while {self.busy[name]}"
        for other in self._under_way(name):
            together = (isinstance(command, Sleep) and isinstance(other, Sleep)) or (
                isinstance(command, Wake) and isinstance(other, Wake)
            )
            assert other is command or together, f"{command} beside {other}"

    def _may_work(self, name: str) -> None:
        assert self.residency[name] is AWAKE
        assert all(self.residency[other] is ASLEEP for other in self._other_sleepers(name))

    def _may_sync(self, follower: str, source: str) -> None:
        together = self.plan.executors[follower].group == self.plan.executors[source].group
        for end in (follower, source):
            if self.plan.executors[end].sleeps:
                assert self.residency[end] is WEIGHTS or (self.residency[end] is AWAKE and not together)
                assert all(
                    self.residency[other] is ASLEEP for other in {*self._other_sleepers(end)} - {follower, source}
                )


@st.composite
def plans(draw) -> Plan:
    """Up to two policies with their generators, and up to two frozen engines, on up to three groups."""
    groups = st.sampled_from(draw(st.sampled_from([["a"], ["a", "b"], ["a", "b", "c"]])))
    pairs, frozen = draw(st.integers(1, 2)), draw(st.integers(0, 2))
    executors = [Executor(HOST, None, ONE_RANK * draw(st.integers(1, 2)))]
    tasks = [task("prompts", HOST, scope=Scope.BATCH)]
    told = []
    for pair in range(pairs):
        actor, generator = f"actor{pair}", f"generator{pair}"
        executors.append(executor(actor, draw(groups), trained=True, sleeps=draw(st.booleans())))
        executors.append(executor(generator, draw(groups), follows=actor, sleeps=draw(st.booleans())))
        # A second policy answers the first one, or the prompts.
        asked = draw(st.sampled_from(["prompts", *told]))
        rollout = f"rollout{pair}"
        tasks.append(task(rollout, generator, asked, streams=True, generates=True))
        tasks.append(task(f"reward{pair}", HOST, rollout))
        told.append(rollout)
        needs = [f"reward{pair}"]
        if draw(st.booleans()):
            tasks.append(task(f"old{pair}", actor, rollout))
            needs.append(f"old{pair}")
        if pair < frozen:
            reference = f"reference{pair}"
            executors.append(executor(reference, draw(groups), sleeps=draw(st.booleans())))
            tasks.append(task(f"ref{pair}", reference, draw(st.sampled_from(told))))
            needs.append(f"ref{pair}")
        tasks.append(task(f"advantage{pair}", HOST, *needs, scope=Scope.GROUP))
        tasks.append(task(f"update{pair}", actor, f"advantage{pair}", scope=Scope.BATCH, trains=True))
    validation = for_validation(tasks, "prompts", *told, *(f"reward{pair}" for pair in range(pairs)))
    alone = {each.name for each in executors if sum(other.group == each.group for other in executors) == 1}
    executors = [replace(each, sleeps=each.sleeps and each.name not in alone) for each in executors]
    return Plan(
        {each.name: each for each in executors},
        (*tasks, *validation),
        shards=draw(st.integers(1, 3)),
        steps=draw(st.integers(1, 3)),
        max_staleness=draw(st.integers(0, 2)),
        validate_every=draw(st.sampled_from([None, 1, 2])),
        validate_first=draw(st.booleans()),
        save_every=draw(st.sampled_from([None, 1, 2])),
    )


@settings(deadline=None, max_examples=150)
@given(plan=plans(), stops=st.booleans(), random=st.randoms(use_true_random=False))
def test_whoever_shares_with_whom_all_is_done_once_and_nobody_is_in_anothers_way(plan, stops, random):
    first_step = random.randint(1, plan.steps)
    scheduler, watch = Scheduler(plan, first_step), Watch(plan)
    watch.trained = dict.fromkeys(plan.executors, first_step - 1)
    stop_at = random.randint(0, 60) if stops else None
    pending: list[Command] = []
    streamed: dict[Command, list[int]] = {}

    def begin(commands: list[Command]) -> None:
        for command in commands:
            watch.begin(command)
            pending.append(command)
            if isinstance(command, Run) and watch.task_of[command.task].streams:
                streamed[command] = list(command.shards)

    begin(scheduler.start())
    events = 0
    while not scheduler.finished:
        assert pending, "nothing is under way and nothing may start: a deadlock"
        assert events < 3000, "no end in sight"
        events += 1
        if events == stop_at:
            begin(scheduler.handle(StopRequested()))
            continue
        command = random.choice(pending)
        if streamed.get(command) and random.random() < 0.7:
            shard = streamed[command].pop(0)
            begin(scheduler.handle(ShardDone(command.step, command.task, shard)))
            continue
        pending.remove(command)
        watch.end(command)
        begin(scheduler.handle(event_of(command)))
    done = {name: watch.runs.count(name) for name in watch.runs}
    assert set(done.values()) <= {1}
    first = 0 if plan.validate_first and first_step == 1 else first_step
    assert watch.commits == list(range(first, first + len(watch.commits)))
    expected = {
        (step, task.name, shard)
        for step in watch.commits
        for task in plan.tasks_of(step)
        for shard in range(plan.shards)
    }
    assert expected <= set(done)
    if not scheduler.stopping:
        assert watch.commits == list(range(first, plan.steps + 1))
        assert expected == set(done)
    saved = {step for step, _ in watch.saves}
    assert saved >= {step for step in watch.commits if step > 0 and plan.saves(step)}
    if not any(each.sleeps for each in plan.executors.values()):
        assert watch.moves == 0
