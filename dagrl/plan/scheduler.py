"""The scheduler: a state machine that says what may run now. Events in, commands out; no I/O, no clock, no Ray.

A *step* is one pass through the DAG. Its batch is split into *shards* of whole groups; a row-wise task runs on each
shard as soon as its inputs are there, a batch task when all are. Synchronous, colocated and asynchronous training
differ only in `Plan.max_staleness` and in who shares a group:

- A step opens once step ``s - 1 - max_staleness`` has nothing left to run.
- A task runs when its inputs are done (a source: when the earlier steps have theirs), its executor has a free worker,
  and no other executor of its group is busy.
- Weights: version v is the policy after step v. A rollout of step s needs version ``s - 1 - max_staleness`` or newer,
  a validation of step s needs version s; where the generator is behind, a `Sync` comes first. A follower that has
  slept has no weights any more. Tasks on trained weights keep the order of the steps.
- Memory: where executors of a group sleep, `turns` says what has to move before one of them may work. Whoever is awake
  goes on as long as it has something to do; then the oldest step that waits for room gets it. A younger step has nobody
  moved away before whom lies work of an older one: it may only wait for a commit.
- An update in pieces takes them in their order. Until its last one is over the trained weights are nobody's: no other
  task uses them, and no sync does, unless a generator has lost its own and this very step waits for it.
- A generator about to begin gets its weights before a source of another group goes on, be it with an older step: a sync
  is short, and the generator would stand still for all that the older step has left.
- With `Plan.in_flight` a generator that is at work gets newer weights as soon as its source has a moment for that.
- What has lost its workers is restarted: at once where nobody of its group sleeps, or when a step waits for it and the
  others are asleep. What the workers had not brought yet is run again, after a sync.
- A step that saves saves each trained executor as soon as it has trained it, while it is still awake.
- A step whose tasks and saves are all done is committed, in order.
- After `StopRequested` the oldest step not yet at its commit is finished, saved and committed; nothing else starts.

Followed by `dagrl.runtime.driver`, which carries out the commands and reports the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dagrl.plan.commands import (
    Command,
    Commit,
    EngineReady,
    Event,
    Restart,
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
    WorkerLost,
)
from dagrl.plan.plan import HOST, Executor, Plan, PlannedTask, Rows
from dagrl.plan.turns import Move, Turns
from dagrl.spec.ops import Scope
from dagrl.spec.residency import Residency

_OnEngines = Run | Sync | Save | Restart
"""What needs room in the memory of a group's devices."""


@dataclass(slots=True)
class _OpenStep:
    """What has happened in one step."""

    tasks: tuple[PlannedTask, ...]
    started: dict[str, set[int]] = field(default_factory=dict)
    done: dict[str, set[int]] = field(default_factory=dict)
    saves_begun: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    commit_issued: bool = False


class Scheduler:
    """Decides, event by event. `first_step` is the step to begin with: 1, or the one after a checkpoint."""

    def __init__(self, plan: Plan, first_step: int = 1) -> None:
        for task in plan.tasks:
            shards = sorted(shard for piece in task.pieces for shard in piece)
            assert not task.pieces or (all(task.pieces) and shards == list(range(plan.shards))), (
                f"pieces of {task.name}"
            )
        self.plan = plan
        self.stopping = False
        self.committed = first_step - 1
        """The newest committed step."""
        self._next_step = 0 if first_step == 1 and plan.validates(0) else first_step
        self._open: dict[int, _OpenStep] = {}
        self._under_way: dict[str, list[Command]] = {name: [] for name in plan.executors}
        self._executor_of = {task.name: task.executor for task in plan.tasks}
        self._trained = [name for name, executor in plan.executors.items() if executor.trained]
        self._turns = Turns(plan)
        self._training: dict[str, tuple[int, str]] = {}
        """Executor -> step and task of an update that has begun and is not over."""
        self._lost: set[str] = set()
        self._version: dict[str, int | None] = {
            name: None if executor.follows else first_step - 1 for name, executor in plan.executors.items()
        }

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do or to wait for."""
        return not self._open and (self.stopping or self._next_step > self.plan.steps)

    def version(self, executor: str) -> int | None:
        """Version of the weights that `executor` holds; None before its first sync, and where they are gone."""
        return self._version[executor]

    def residency(self, executor: str) -> Residency:
        """How much of `executor` is in its devices' memory; on its way, what it comes from."""
        return self._turns.residency(executor)

    def workers_of(self, command: Command) -> tuple[str, ...]:
        """The executors that `command` keeps busy."""
        match command:
            case Run(_, task, _):
                return (self._executor_of[task],)
            case Sync(_, follower, source, _):
                return follower, source
            case Sleep(_, executor, _) | Wake(_, executor, _) | Restart(_, executor) | Save(_, executor):
                return (executor,)
            case Commit():
                return ()

    def start(self) -> list[Command]:
        """The first commands."""
        return self._decide()

    def handle(self, event: Event) -> list[Command]:
        """Take note of `event`; what may start now."""
        match event:
            case ShardDone(step, task, shard):
                self._mark_done(step, task, (shard,))
            case RunDone(run):
                self._finish_run(run)
            case WeightsSynced(sync):
                self._release(sync)
                self._version[sync.follower] = sync.version
            case EngineReady(executor, residency):
                self._settle(executor, residency)
            case StateSaved(save):
                self._release(save)
                self._open[save.step].saved.add(save.executor)
            case StepCommitted(commit):
                self.committed = commit.step
                del self._open[commit.step]
            case WorkerLost(executor, _):
                self._lose(executor)
            case StopRequested():
                self._stop()
        return self._decide()

    # -- what has happened

    def _finish_run(self, run: Run) -> None:
        task = self.plan.task(run.task)
        self._release(run)
        self._mark_done(run.step, run.task, run.shards)
        if task.trains and (not task.pieces or run.shards == task.pieces[-1]):
            self._version[task.executor] = run.step
            del self._training[task.executor]

    def _mark_done(self, step: int, task: str, shards: tuple[int, ...]) -> None:
        if step in self._open:  # else: dropped by a stop
            self._open[step].done.setdefault(task, set()).update(shards)

    def _settle(self, executor: str, residency: Residency) -> None:
        (move,) = self._under_way[executor]
        self._release(move)
        self._turns.arrive(executor, residency)
        self._lost.discard(executor)
        if residency is Residency.ASLEEP and self.plan.executors[executor].follows:
            self._version[executor] = None

    def _lose(self, executor: str) -> None:
        assert executor != HOST and not self.plan.executors[executor].trained, f"{executor} cannot go on without"
        for command in tuple(self._under_way[executor]):
            self._release(command)
            match command:
                case Run(step, task, shards) if step in self._open:  # else: dropped by a stop
                    state = self._open[step]
                    state.started[task] -= {*shards} - state.done.get(task, set())
                case Sync(_, follower, _, _):
                    self._version[follower] = None
        self._lost.add(executor)
        self._turns.arrive(executor, Residency.ASLEEP)
        if self.plan.executors[executor].follows:
            self._version[executor] = None

    def _stop(self) -> None:
        self.stopping = True
        unfinished = [step for step in sorted(self._open) if not self._open[step].commit_issued]
        for step in unfinished[1:]:
            del self._open[step]

    # -- what may start now

    def _decide(self) -> list[Command]:
        self._open_steps()
        commands: list[Command] = [*self._refreshes(), *self._first_syncs()]
        without_room: list[_OnEngines] = []
        for step in sorted(self._open):
            commands += self._runs(step, without_room)
            commands += self._saves(step, without_room)
        return [*commands, *self._restarts(), *self._commits(), *self._moves(without_room)]

    def _open_steps(self) -> None:
        while not self.stopping and self._next_step <= self.plan.steps:
            bound = self._next_step - self.plan.max_staleness
            if any(step < bound and self._unfinished(step) for step in self._open):
                return
            self._open[self._next_step] = _OpenStep(self.plan.tasks_of(self._next_step))
            self._next_step += 1

    def _unfinished(self, step: int) -> bool:
        """Whether something of `step` is still to be run."""
        state = self._open[step]
        return any(len(state.done.get(task.name, ())) < self.plan.shards for task in state.tasks)

    def _runs(self, step: int, without_room: list[_OnEngines]) -> Iterator[Command]:
        """What brings the tasks of `step` on; what waits for nothing but room goes to `without_room`."""
        for task in self._open[step].tasks:
            for shards in self._ready(step, task):
                command = self._due(step, task, shards)
                if command is None or not self._begin(command, without_room):
                    break
                yield command

    def _ready(self, step: int, task: PlannedTask) -> Iterator[tuple[int, ...]]:
        """Sets of shards on which `task` has its inputs and was not started, each to be run together."""
        state = self._open[step]
        every = set(range(self.plan.shards))
        waiting = every - state.started.get(task.name, set())
        if not waiting:
            return
        inputs = every.intersection(*(state.done.get(need, set()) for need in task.needs)) if task.needs else every
        if task.pieces:
            piece = next(piece for piece in task.pieces if waiting.issuperset(piece))
            others_are_over = len(state.done.get(task.name, ())) + len(waiting) == self.plan.shards
            if others_are_over and inputs.issuperset(piece):
                yield piece
        elif task.streams or task.scope is Scope.BATCH:
            if inputs == every:
                yield tuple(sorted(waiting))
        else:
            for shard in sorted(waiting & inputs):
                yield (shard,)

    def _due(self, step: int, task: PlannedTask, shards: tuple[int, ...]) -> Run | Sync | Restart | None:
        """What brings `task` on if there is room: its run, what must come before it, or None where it must wait."""
        executor = self.plan.executors[task.executor]
        if not self._free(executor) or not self._in_turn(step, task, executor):
            return None
        if task.generates and executor.follows:
            wanted, newest = self._wanted_version(step, task), self._version[executor.follows]
            held = self._version[executor.name]
            assert newest is not None, "an executor that is followed holds weights from the start"
            if held is None or held < wanted:
                return self._needed_sync(step, executor, executor.follows, wanted)
            sync = Sync(step, executor.name, executor.follows, newest)
            # Weights that are new enough are worth a sync, but no move.
            if held < newest and self._may_send(executor.follows) and not self._moves_before(sync):
                return sync
        return Restart(step, executor.name) if executor.name in self._lost else Run(step, task.name, shards)

    def _needed_sync(self, step: int, follower: Executor, source: str, wanted: int) -> Sync | Restart | None:
        """What brings weights to a follower that may not work without, or None where that must wait."""
        newest = self._version[source]
        assert newest is not None
        if newest < wanted:
            return None
        for name in (follower.name, source):
            if name in self._lost:
                return Restart(step, name) if self._free(self.plan.executors[name]) else None
        # The rest of a step that is being trained may wait for these weights: there will be none of its own before.
        training = self._training.get(source)
        lacks_weights = self._version[follower.name] is None and training is not None and step <= training[0]
        return Sync(step, follower.name, source, newest) if self._may_send(source, lacks_weights) else None

    def _may_send(self, source: str, in_midst: bool = False) -> bool:
        """Whether weights of `source` may be taken; `in_midst`: those of an update that is not over, too."""
        return (in_midst or source not in self._training) and self._free(self.plan.executors[source])

    def _refreshes(self) -> Iterator[Command]:
        """Syncs for generators in the midst of a run."""
        for follower in self.plan.executors.values() if self.plan.in_flight else ():
            match self._under_way[follower.name], follower.follows:
                case [Run(step, task, _)], str(source) if self.plan.task(task).generates:
                    held, newest = self._version[follower.name], self._version[source]
                    assert held is not None and newest is not None, "a generator at work has weights"
                    sync = Sync(step, follower.name, source, newest)
                    if held < newest and self._may_send(source) and not self._moves_before(sync):
                        self._occupy(sync)
                        yield sync

    def _first_syncs(self) -> Iterator[Command]:
        """Syncs for generators about to begin, before their sources, of other groups, go on with older steps."""
        for step in sorted(self._open):
            for task in self._open[step].tasks:
                if not task.generates or not self._is_apart(self.plan.executors[task.executor]):
                    continue
                sync = next((self._due(step, task, shards) for shards in self._ready(step, task)), None)
                if isinstance(sync, Sync) and not self._moves_before(sync):
                    self._occupy(sync)
                    yield sync

    def _is_apart(self, executor: Executor) -> bool:
        """Whether it follows an executor of another group."""
        source = self.plan.executors.get(executor.follows or "")
        return source is not None and source.group != executor.group

    def _restarts(self) -> Iterator[Command]:
        """Of lost executors that take no turns, before a step waits for them."""
        for name in sorted(self._lost):
            if self._turns.takes_turns(name) or not self._free(self.plan.executors[name]):
                continue
            steps = (step for step in sorted(self._open) if self._has_work(step, name))
            step = next(steps, None if self.stopping or self._next_step > self.plan.steps else self._next_step)
            if step is not None:
                restart = Restart(step, name)
                self._occupy(restart)
                yield restart

    def _has_work(self, step: int, executor: str) -> bool:
        state = self._open[step]
        return any(
            task.executor == executor and len(state.done.get(task.name, ())) < self.plan.shards for task in state.tasks
        )

    def _begin(self, command: _OnEngines, without_room: list[_OnEngines]) -> bool:
        """Whether there is room for `command`, which is due; it begins then, and goes to `without_room` otherwise."""
        if self._moves_before(command):
            without_room.append(command)
            return False
        self._occupy(command)
        match command:
            case Run(step, task, shards):
                self._open[step].started.setdefault(task, set()).update(shards)
                if self.plan.task(task).trains:
                    self._training[self._executor_of[task]] = (step, task)
            case Save(step, executor):
                self._open[step].saves_begun.add(executor)
        return True

    def _wanted_version(self, step: int, task: PlannedTask) -> int:
        return step if task.rows is Rows.VALIDATION else max(0, step - 1 - self.plan.max_staleness)

    def _in_turn(self, step: int, task: PlannedTask, executor: Executor) -> bool:
        """Whether the order of the steps allows `task`: on weights that move, and on a source that is read in order."""
        if not task.inputs:
            return all(task.name in state.done for earlier, state in self._open.items() if earlier < step)
        if not executor.trained or task.frozen:
            return True
        if self._training.get(executor.name, (step, task.name)) != (step, task.name):
            return False
        if task.trains and self.committed < step - 1:
            return False
        version = self._version[executor.name]
        return version is not None and version >= (step if task.rows is Rows.VALIDATION else step - 1)

    def _saves(self, step: int, without_room: list[_OnEngines]) -> Iterator[Command]:
        if self._open[step].commit_issued or not self._is_saved(step):
            return
        for name in self._trained:
            command = Save(step, name)
            is_due = self._version[name] == step and name not in self._open[step].saves_begun
            if is_due and self._free(self.plan.executors[name]) and self._begin(command, without_room):
                yield command

    def _is_saved(self, step: int) -> bool:
        return step > 0 and (self.plan.saves(step) or self.stopping)

    def _commits(self) -> Iterator[Command]:
        for step in sorted(self._open):
            state = self._open[step]
            if state.commit_issued:
                continue
            save = self._is_saved(step)
            if self._unfinished(step) or (save and not state.saved.issuperset(self._trained)):
                return
            state.commit_issued = True
            yield Commit(step, save)

    def _moves(self, without_room: list[_OnEngines]) -> Iterator[Command]:
        """Make room for what is due, the oldest first; one thing at a time in a group."""
        for command in without_room:
            if not all(self._free(self.plan.executors[name]) for name in self.workers_of(command)):
                continue
            moves = self._moves_before(command)
            if any(move.down and self._has_older_work(move.executor, command.step) for move in moves):
                continue
            for move in moves:
                begun = (Sleep if move.down else Wake)(command.step, move.executor, move.to)
                self._occupy(begun)
                yield begun

    def _moves_before(self, command: _OnEngines) -> list[Move]:
        match command:
            case Run(_, task, _):
                return self._turns.before_work(self._executor_of[task])
            case Sync(_, follower, source, _):
                return self._turns.before_sync(follower, source)
            case Save(_, executor):
                return self._turns.before_work(executor)
            case Restart(_, executor):
                return self._turns.before_restart(executor)

    def _has_older_work(self, executor: str, step: int) -> bool:
        return any(
            task.executor == executor and any(self._ready(earlier, task))
            for earlier, state in self._open.items()
            if earlier < step
            for task in state.tasks
        )

    # -- who is busy

    def _free(self, executor: Executor) -> bool:
        if len(self._under_way[executor.name]) >= (executor.ranks if executor.name == HOST else 1):
            return False
        return executor.group is None or not any(
            self._under_way[other.name]
            for other in self.plan.executors.values()
            if other.group == executor.group and other.name != executor.name
        )

    def _occupy(self, command: Command) -> None:
        for name in self.workers_of(command):
            self._under_way[name].append(command)

    def _release(self, command: Command) -> None:
        for name in self.workers_of(command):
            assert command in self._under_way[name], f"{command} is over, but was not under way on {name}"
            self._under_way[name].remove(command)
