"""The scheduler: a state machine that says what may run now. Events in, commands out; no I/O, no clock, no Ray.

A *step* is one pass through the DAG. Its batch is split into *shards* of whole groups; a row-wise task runs on each
shard as soon as its inputs are there, a batch task when all are. Synchronous, colocated and asynchronous training
differ only in `Plan.max_staleness` and in who shares a group:

- A step opens once step ``s - 1 - max_staleness`` has nothing left to run.
- A task runs when its inputs are done (a source: when the earlier steps have theirs), its executor has a free worker,
  and no other executor of its group is busy.
- Weights: version v is the policy after step v. A rollout of step s needs version ``s - 1 - max_staleness`` or newer,
  a validation of step s needs version s; where the generator is behind, a `Sync` comes first. Tasks on trained
  weights keep the order of the steps.
- A step whose tasks are all done is committed, in order; a commit that saves keeps the trained executors to itself.
- After `StopRequested` the oldest step not yet at its commit is finished, committed and saved; nothing else starts.

Followed by `dagrl.runtime.driver`, which carries out the commands and reports the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dagrl.plan.plan import HOST, Executor, Plan, PlannedTask, Rows
from dagrl.spec.ops import Scope


@dataclass(frozen=True, slots=True)
class Run:
    """Run `task` of `step` on these shards."""

    step: int
    task: str
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sync:
    """Bring the weights of `source`, at `version`, to `follower`, for which `step` waits."""

    step: int
    follower: str
    source: str
    version: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the step's metrics, and a checkpoint if `save`."""

    step: int
    save: bool


Command = Run | Sync | Commit


@dataclass(frozen=True, slots=True)
class ShardDone:
    """A streaming run has finished one shard and goes on with the others."""

    step: int
    task: str
    shard: int


@dataclass(frozen=True, slots=True)
class RunDone:
    """A run is over: all its shards are done and its workers are free."""

    run: Run


@dataclass(frozen=True, slots=True)
class WeightsSynced:
    """A sync is over."""

    sync: Sync


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """A commit is over."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user wants the run to end at the next step boundary."""


Event = ShardDone | RunDone | WeightsSynced | StepCommitted | StopRequested


@dataclass(slots=True)
class _OpenStep:
    """What has happened in one step."""

    tasks: tuple[PlannedTask, ...]
    started: dict[str, set[int]] = field(default_factory=dict)
    done: dict[str, set[int]] = field(default_factory=dict)
    commit_issued: bool = False


class Scheduler:
    """Decides, event by event. `first_step` is the step to begin with: 1, or the one after a checkpoint."""

    def __init__(self, plan: Plan, first_step: int = 1) -> None:
        self.plan = plan
        self.stopping = False
        self.committed = first_step - 1
        """The newest committed step."""
        self._next_step = 0 if first_step == 1 and plan.validates(0) else first_step
        self._open: dict[int, _OpenStep] = {}
        self._busy: dict[str, int] = dict.fromkeys(plan.executors, 0)
        self._version: dict[str, int | None] = {
            name: None if executor.follows else first_step - 1 for name, executor in plan.executors.items()
        }

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do or to wait for."""
        return not self._open and (self.stopping or self._next_step > self.plan.steps)

    def version(self, executor: str) -> int | None:
        """Version of the weights that `executor` holds; None before its first sync."""
        return self._version[executor]

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
                self._release(sync.follower, sync.source)
                self._version[sync.follower] = sync.version
            case StepCommitted(commit):
                if commit.save:
                    self._release(*self._trained())
                self.committed = commit.step
                del self._open[commit.step]
            case StopRequested():
                self._stop()
        return self._decide()

    # -- what has happened

    def _finish_run(self, run: Run) -> None:
        task = self.plan.task(run.task)
        self._release(task.executor)
        if task.trains:
            self._version[task.executor] = run.step
        self._mark_done(run.step, run.task, run.shards)

    def _mark_done(self, step: int, task: str, shards: tuple[int, ...]) -> None:
        if step in self._open:  # else: dropped by a stop
            self._open[step].done.setdefault(task, set()).update(shards)

    def _stop(self) -> None:
        self.stopping = True
        unfinished = [step for step in sorted(self._open) if not self._open[step].commit_issued]
        for step in unfinished[1:]:
            del self._open[step]

    # -- what may start now

    def _decide(self) -> list[Command]:
        self._open_steps()
        return [*self._runs(), *self._commits()]

    def _open_steps(self) -> None:
        while not self.stopping and self._next_step <= self.plan.steps:
            in_the_way = [
                step
                for step, state in self._open.items()
                if step < self._next_step - self.plan.max_staleness and not state.commit_issued
            ]
            if in_the_way:
                return
            self._open[self._next_step] = _OpenStep(self.plan.tasks_of(self._next_step))
            self._next_step += 1

    def _runs(self) -> Iterator[Command]:
        for step in sorted(self._open):
            for task in self._open[step].tasks:
                for shards in self._ready(step, task):
                    command = self._admit(step, task, shards)
                    if command is None:
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
        if task.streams or task.scope is Scope.BATCH:
            if inputs == every:
                yield tuple(sorted(every))
        else:
            for shard in sorted(waiting & inputs):
                yield (shard,)

    def _admit(self, step: int, task: PlannedTask, shards: tuple[int, ...]) -> Command | None:
        """The command that brings `task` on: its run, a sync that it waits for, or None where it must wait."""
        executor = self.plan.executors[task.executor]
        if not self._free(executor) or not self._in_turn(step, task, executor):
            return None
        if task.generates and executor.follows:
            wanted, newest = self._wanted_version(step, task), self._version[executor.follows]
            held = self._version[executor.name]
            assert newest is not None, "an executor that is followed holds weights from the start"
            if (
                (held is None or held < newest)
                and newest >= wanted
                and self._free(self.plan.executors[executor.follows])
            ):
                self._occupy(executor.name, executor.follows)
                return Sync(step, executor.name, executor.follows, newest)
            if held is None or held < wanted:
                return None
        self._occupy(executor.name)
        self._open[step].started.setdefault(task.name, set()).update(shards)
        return Run(step, task.name, shards)

    def _wanted_version(self, step: int, task: PlannedTask) -> int:
        return step if task.rows is Rows.VALIDATION else max(0, step - 1 - self.plan.max_staleness)

    def _in_turn(self, step: int, task: PlannedTask, executor: Executor) -> bool:
        """Whether the order of the steps allows `task`: on weights that move, and on a source that is read in order."""
        if not task.inputs:
            return all(task.name in state.done for earlier, state in self._open.items() if earlier < step)
        if not executor.trained or task.frozen:
            return True
        if task.trains and self.committed < step - 1:
            return False
        version = self._version[executor.name]
        return version is not None and version >= (step if task.rows is Rows.VALIDATION else step - 1)

    def _commits(self) -> Iterator[Command]:
        for step in sorted(self._open):
            state = self._open[step]
            if state.commit_issued:
                continue
            if any(len(state.done.get(task.name, ())) < self.plan.shards for task in state.tasks):
                return
            save = step > 0 and (self.plan.saves(step) or self.stopping)
            if save and not all(self._free(self.plan.executors[name]) for name in self._trained()):
                return
            if save:
                self._occupy(*self._trained())
            state.commit_issued = True
            yield Commit(step, save)

    # -- who is busy

    def _trained(self) -> list[str]:
        return [name for name, executor in self.plan.executors.items() if executor.trained]

    def _free(self, executor: Executor) -> bool:
        if self._busy[executor.name] >= (executor.ranks if executor.name == HOST else 1):
            return False
        return executor.group is None or not any(
            self._busy[other.name]
            for other in self.plan.executors.values()
            if other.group == executor.group and other.name != executor.name
        )

    def _occupy(self, *executors: str) -> None:
        for name in executors:
            self._busy[name] += 1

    def _release(self, *executors: str) -> None:
        for name in executors:
            self._busy[name] -= 1
            assert self._busy[name] >= 0, f"{name} was released twice"
