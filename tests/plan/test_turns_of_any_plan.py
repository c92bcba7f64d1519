"""Turns in memory, whatever the plan, whoever is quicker, and whenever the user stops it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_parts import ONE_RANK, event_of, executor, for_validation, task

from dagrl.plan.commands import Command, Commit, Run, Save, ShardDone, Sleep, StopRequested, Sync, Wake
from dagrl.plan.plan import HOST, Executor, Plan
from dagrl.plan.scheduler import Scheduler
from dagrl.plan.turns import residency_after_start, start_chains
from dagrl.spec.ops import Scope
from dagrl.spec.residency import Residency

ASLEEP, WEIGHTS, AWAKE = Residency.ASLEEP, Residency.WEIGHTS, Residency.AWAKE


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
