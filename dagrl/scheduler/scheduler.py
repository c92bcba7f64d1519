"""The scheduler: a state machine that decides what may run now. Events in, commands out; no I/O, no clock, no Ray.

A *step* is one pass through the DAG. Its batch is split into *shards* of whole groups. Synchronous, colocated and
asynchronous training differ only in `Plan.max_staleness` and in which executors share a group. docs/schedule.md has the
order of work, and the rules of weights and of lost workers. Besides:

- A source runs when earlier steps have read their prompts; sources run before other tasks, as generators may wait for
  them; then tasks by step, engines before CPU workers.
- Work is queued on a busy worker only if it is certain to come next, which saves a round trip through the driver. It is
  not queued if another executor could need the devices, or older weights, in the meantime.
- An engine that was offloaded, and takes its weights from another one, has none.
- `time_sharing` gives the moves that an executor of a group with sleepers needs before it works. A step never offloads
  an executor with work of an older step.
- A step that is saved saves each trained executor right after its training.
- After `LastStep` later steps do not start, and that step is saved.
- After `StopRequested` the oldest uncommitted step is finished, saved and committed; nothing else starts.

The cost of an event depends on the commands that it may unlock, not on the number of open steps or shards: only dirty
executors are checked, and for each task only its oldest step with work.

`dagrl.orchestrator.driver` executes the commands and reports the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from dagrl.config.residency import Residency
from dagrl.scheduler.commands import (
    BatchShort,
    Command,
    CommandDone,
    Commit,
    Event,
    LastStep,
    OnEngine,
    Restart,
    Run,
    Save,
    ShardDone,
    Sleep,
    StopRequested,
    Sync,
    Wake,
    WorkerLost,
)
from dagrl.scheduler.history import History, SchedulerError, describe
from dagrl.scheduler.open_steps import CommitPolicy, OpenSteps
from dagrl.scheduler.plan import HOST, Plan
from dagrl.scheduler.resources import DirtySet, ResourceTracker
from dagrl.scheduler.syncs import SyncPolicy, WeightVersions
from dagrl.scheduler.task_state import TaskState
from dagrl.scheduler.time_sharing import TimeSharing
from dagrl.scheduler.validate_state import validate_state


class Scheduler:
    """Schedules event by event. `first_step`: 1, or the step after a checkpoint."""

    def __init__(self, plan: Plan, first_step: int = 1) -> None:
        self.plan = plan
        first = 0 if first_step == 1 and plan.validates(0) else first_step
        if plan.only_validates:
            first = plan.steps
        self.committed = first - 1
        """The newest committed step; -1 if the start weights are validated first."""
        self.history = History(plan)
        self._trained = [name for name, executor in plan.executors.items() if executor.trained]
        self._lost: set[str] = set()
        self._dirty = DirtySet(plan)
        self._steps = OpenSteps(plan, first, self._dirty)
        self._resources = ResourceTracker(plan, self._dirty)
        self._sharing = TimeSharing(plan)
        self._versions = WeightVersions(plan, first_step)
        self._syncs = SyncPolicy(plan, self._resources, self._sharing, self._versions, self._lost)
        self._commits = CommitPolicy(plan, first, self._steps, self._versions)
        self._generating = {
            name: [state for state in states if state.task.generates]
            for name, states in self._steps.tasks_on.items()
            if plan.executors[name].weights_from
        }
        """Generators -> their rollouts."""

    @property
    def stopping(self) -> bool:
        return self._steps.stopping

    @property
    def last_step(self) -> int:
        """The last step of the run: the plan's, or the step of `LastStep`."""
        return self._steps.last

    @property
    def finished(self) -> bool:
        return self._steps.finished

    def version(self, executor: str) -> int | None:
        """The weight version that `executor` holds. None before its first sync, or if the weights are lost."""
        return self._versions.held(executor)

    def residency(self, executor: str) -> Residency:
        """Contents of device memory of `executor`; during a move, the contents before it."""
        return self._sharing.residency(executor)

    def workers_of(self, command: Command) -> tuple[str, ...]:
        return self._resources.workers_of(command)

    def start(self) -> list[Command]:
        return self._decide()

    def handle(self, *events: Event) -> list[Command]:
        """Handle `events`, in the order in which they happened; returns the commands that may start.

        Raises SchedulerError if an event belongs to no command, or if nothing is under way and nothing may start.
        """
        try:
            for event in events:
                self.history.note(event)
                self._note(event)
            return self._decide()
        except AssertionError as error:
            raise SchedulerError(str(error), self.history.story()) from error

    def validate_state(self) -> None:
        """Raises SchedulerError if an invariant does not hold, or if a command that could begin was overlooked."""
        validate_state(self.plan, self.history, self._resources, self._steps, self.residency, self.version)
        self._dirty.mark(*self.plan.executors)
        touched, without_room = self._dirty.take(), list[OnEngine]()
        # Syncs and restarts that are early are not due.
        due = self._work(touched, without_room), self._commits.due(), self._moves(without_room)
        if overlooked := [command for commands in due for command in commands]:
            self.history.fail(f"`{describe(overlooked[0])}` could have begun earlier", overlooked[0])

    def _note(self, event: Event) -> None:
        match event:
            case ShardDone(step, task, shard, round_):
                self._steps.finish(Run(step, task, (shard,), round_))
            case CommandDone(command):
                self._finish(command)
            case BatchShort(run):
                self._resources.release(run)
                self._steps.begin_round(run.step)
            case WorkerLost(executor):
                self._lose(executor)
            case LastStep(step):
                self._steps.end_with(step)
                self._dirty.mark(*self.plan.executors)
            case StopRequested():
                self._steps.stop_after(self._commits.next)
                self._dirty.mark(*self.plan.executors)

    # -- events

    def _finish(self, command: Command) -> None:
        self._resources.release(command)
        match command:
            case Run(step, task):
                self._steps.finish(command)
                state = self._steps.tasks[task]
                if state.ends_training(command):
                    self._versions.finish_training(step, state.task)
            case Sync():
                self._versions.set_held(command.follower, command.version)
            case Sleep() | Wake():
                self._set_residency(command.executor, command.residency)
            case Restart():
                self._lost.discard(command.executor)
                self._set_residency(command.executor, Residency.AWAKE)
            case Save():
                self._commits.finish(command)
            case Commit():
                self.committed = max(self.committed, command.step)
                self._steps.close(command.step)
                self._dirty.mark(*self._trained)

    def _lose(self, executor: str) -> None:
        assert executor != HOST and executor not in self._trained, f"{executor} cannot continue without its workers"
        for command in self._resources.running(executor):
            self._resources.release(command)
            if isinstance(command, Run):
                self._steps.give_back(command)
        self._lost.add(executor)
        self._set_residency(executor, Residency.ASLEEP)
        self._dirty.mark(executor)

    def _set_residency(self, executor: str, residency: Residency) -> None:
        self._sharing.set_residency(executor, residency)
        if residency is Residency.ASLEEP and self.plan.executors[executor].weights_from:
            self._versions.set_held(executor, None)

    # -- decisions

    def _decide(self) -> list[Command]:
        commands: list[Command] = []
        # A command that begins may unlock another one: a queued run, or a step.
        while begun := self._what_begins():
            commands += begun
        self.history.begin(commands)
        if not self.history.under_way and not self.finished:
            raise SchedulerError("nothing is under way and nothing may start", self.history.story())
        return commands

    def _what_begins(self) -> list[Command]:
        self._steps.open()
        touched = self._dirty.take()
        without_room: list[OnEngine] = []
        return [
            *self._refreshes(touched),
            *self._first_syncs(touched),
            *self._work(touched, without_room),
            *self._early_syncs(touched, without_room),
            *self._restarts(touched),
            *self._commits.due(),
            *self._moves(without_room),
        ]

    def _work(self, executors: list[str], without_room: list[OnEngine]) -> Iterator[Command]:
        """Commands for the tasks and saves of `executors`: sources first, then by step."""
        queue: list[tuple[bool, int, bool, int, TaskState | Save]] = []
        for name in executors:
            if (
                not self._resources.free(name)
                and not self._resources.queue_behind(name)
                and not self._resources.incoming_sync(name)
            ):
                continue
            for state in self._steps.tasks_on[name]:
                if (step := state.oldest_ready()) is not None:
                    queue.append((not state.is_source, step, name == HOST, state.place, state))
            if (save := self._commits.due_save(name)) is not None:
                queue.append((True, save.step, False, len(self._steps.tasks) + self._trained.index(name), save))
        heapify(queue)
        while queue:
            rank, step, on_host, place, item = heappop(queue)
            if isinstance(item, Save):
                if self._resources.free(item.executor) and self._begin(item, without_room):
                    yield item
                continue
            yield from self._runs(step, item, without_room)
            younger = item.oldest_ready()
            if younger is not None and younger > step:
                heappush(queue, (rank, younger, on_host, place, item))

    def _runs(self, step: int, state: TaskState, without_room: list[OnEngine]) -> Iterator[Command]:
        """Commands for a task. Commands that only wait for memory go to `without_room`."""
        progress = state.progress(step)
        while progress.ready:
            command = self._due(step, state)
            if command is None or not self._begin(command, without_room):
                return
            yield command

    def _due(self, step: int, state: TaskState) -> Run | Sync | Restart | None:
        """The next command for a task: its run, or a command that must precede it. None if it must wait."""
        task, executor = state.task, state.executor
        if not self._in_turn(step, state):
            return None
        run = Run(step, task.name, state.progress(step).next, state.round_in(step))
        if not self._resources.free(executor.name):
            return run if self._may_queue(step, state) else None
        if executor.weights_from:
            if self._syncs.lacks_weights(step, task):
                return self._syncs.needed(step, task) or self._sync_behind_update(step, state)
            if (sync := self._syncs.worthwhile(step, executor.name)) is not None:
                return sync
        if executor.name in self._lost:
            return Restart(step, executor.name)
        return run

    def _may_queue(self, step: int, state: TaskState) -> bool:
        """Whether a task may be queued on busy workers.

        A rollout may be queued behind its weights; another task behind a run of the same step, unless a sync from that
        executor is due.
        """
        name = state.executor.name
        if state.task.generates:
            coming = self._resources.incoming_sync(name)
            return coming is not None and coming.version >= self._versions.wanted(step, state.task)
        ahead = self._resources.queue_behind(name)
        follows_it = ahead is not None and ahead.step == step and state.progress(step).takes_rest
        return follows_it and not self._syncs.is_wanted_of(name)

    def _sync_behind_update(self, step: int, state: TaskState) -> Sync | None:
        """A sync queued behind the update that computes the weights, if the task's executor is idle until then."""
        idle = self._steps.is_all_for(state.executor.name, state, step)
        return self._syncs.behind_update(step, state.task) if idle else None

    def _in_turn(self, step: int, state: TaskState) -> bool:
        """Whether the order of steps allows a task: it restricts sources, buffers and trained weights."""
        if state.in_order:
            return state.oldest_undone == step
        if state.task.trains and step - 1 in self._steps:
            return False
        return self._versions.in_order(step, state.task, state.executor)

    def _first_syncs(self, executors: list[str]) -> Iterator[Command]:
        """Syncs for generators that are about to begin, before sources in other groups continue with older steps."""
        for sync in self._next_syncs(executors):
            if self._syncs.is_between_groups(sync) and not self._sharing.before(sync):
                self._resources.occupy(sync)
                yield sync

    def _early_syncs(self, executors: list[str], without_room: list[OnEngine]) -> Iterator[Command]:
        """Syncs, and moves before them, for generators whose prompts are being read."""
        for sync in self._next_syncs(executors):
            if self._begin(sync, without_room):
                yield sync

    def _next_syncs(self, executors: list[str]) -> Iterator[Sync]:
        """Syncs that are due for generators with work, or with prompts to come."""
        for name in executors:
            for state in self._generating.get(name, ()):
                step = state.oldest_soon()
                due = self._due(step, state) if step is not None else None
                if isinstance(due, Sync):
                    yield due

    def _refreshes(self, executors: list[str]) -> Iterator[Command]:
        """Syncs for generators that are sampling (`Plan.in_flight`)."""
        for name in executors if self.plan.in_flight else ():
            match self._resources.running(name) if name in self._generating else ():
                case [Run(step, task, _)] if step in self._steps and self._steps.tasks[task].task.generates:
                    if (sync := self._syncs.worthwhile(step, name)) is not None:
                        self._resources.occupy(sync)
                        yield sync

    def _begin(self, command: OnEngine, without_room: list[OnEngine]) -> bool:
        """Begin a command that is due; returns whether there is memory. If not, it goes to `without_room`."""
        if self._sharing.before(command):
            without_room.append(command)
            return False
        self._resources.occupy(command)
        match command:
            case Run(step, name):
                state = self._steps.tasks[name]
                self._steps.begin_run(command)
                if state.task.trains:
                    self._versions.begin_training(step, state.task, ends=state.ends_training(command))
            case Save():
                self._commits.begin(command)
        return True

    def _restarts(self, executors: list[str]) -> Iterator[Command]:
        """Restarts of lost executors that are not time-shared, before a step needs them."""
        for name in executors:
            if name not in self._lost or self._sharing.is_shared(name) or not self._resources.free(name):
                continue
            if (step := self._steps.next_for(name)) is not None:
                restart = Restart(step, name)
                self._resources.occupy(restart)
                yield restart

    def _moves(self, without_room: list[OnEngine]) -> Iterator[Command]:
        """Make room for commands that are due, oldest step first; one at a time in a group."""
        for command in sorted(without_room, key=lambda command: command.step):
            if not self._resources.free(*self._resources.workers_of(command)):
                continue
            moves = self._sharing.before(command)
            if any(isinstance(move, Sleep) and self._has_older_work(move.executor, move.step) for move in moves):
                continue
            for move in moves:
                self._resources.occupy(move)
                yield move

    def _has_older_work(self, executor: str, step: int) -> bool:
        oldest = (state.oldest_ready() for state in self._steps.tasks_on[executor])
        return any(ready is not None and ready < step for ready in oldest)
