"""The scheduler: a state machine that says what may run now. Events in, commands out; no I/O, no clock, no Ray.

A *step* is one pass through the DAG. Its batch is split into *shards* of whole groups; a row-wise task runs on each
shard as soon as its inputs are there, a batch task when all are. Synchronous, colocated and asynchronous training
differ only in `Plan.max_staleness` and in who shares a group:

- A step opens once all that is left of step ``s - 1 - max_staleness`` are updates at their last piece.
- A task runs when its inputs are done (a source: when the earlier steps have theirs), its executor has a free worker,
  and no other executor of its group is busy.
- What is sure to come next is sent to workers that are still at something else, so that they need not wait for the
  driver in between: a run behind one of the same step, and that may be the one that makes its inputs; the weights that
  an update makes behind it; a rollout behind its weights. Never where others could want the devices, or older weights,
  in the meantime.
- Tasks in rounds run again, on new prompts, as long as the filter that they end in says that the batch is short. What
  is behind it begins when it is full, and so does the source of the next step: only then it is known where the data go
  on.
- Weights: version v is the policy after step v. A rollout of step s needs version ``s - 1 - max_staleness`` or newer,
  a validation of step s needs version s; where the generator is behind, a `Sync` comes first. So it is with whatever
  else runs on an engine that follows another. One that has slept has no weights any more. Tasks on trained weights keep
  the order of the steps.
- Memory: where executors of a group sleep, `turns` says what has to move before one of them may work. Whoever is awake
  goes on as long as it has something to do; then the oldest step that waits for room gets it. A younger step has nobody
  moved away before whom lies work of an older one: it may only wait for a commit.
- An update in pieces takes them in their order. Until its last one is over the trained weights are nobody's: no other
  task uses them, and no sync does, unless a generator has lost its own and this very step waits for it.
- A generator about to begin gets its weights before a source of another group goes on, be it with an older step: a sync
  is short, and the generator would stand still for all that the older step has left.
- Sources come before what older steps have for the host: they are short, and a generator may wait for them. Then what
  a step has for its engines, and what it has for the host.
- With `Plan.in_flight` a generator that is at work gets newer weights as soon as its source has a moment for that.
- What has lost its workers is restarted: at once where nobody of its group sleeps, or when a step waits for it and the
  others are asleep. What the workers had not brought yet is run again, after a sync.
- A step that saves saves each trained executor as soon as it has trained it, while it is still awake.
- A step whose tasks and saves are all done is committed, in order.
- After `StopRequested` the oldest step not yet at its commit is finished, saved and committed; nothing else starts.

What an event costs depends on what it may unlock, not on how many shards or steps are open: only the neighbourhood of
whatever became free, ready or newer is looked at, and of each task there only the oldest step that has work for it.

Followed by `dagrl.orchestrator.driver`, which carries out the commands and reports the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from dagrl.config.residency import Residency
from dagrl.scheduler.commands import (
    BatchShort,
    Command,
    EngineReady,
    Event,
    OnEngine,
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
from dagrl.scheduler.commits import Commits
from dagrl.scheduler.dirty_set import Neighbourhoods
from dagrl.scheduler.open_steps import OpenSteps
from dagrl.scheduler.plan import HOST, Plan
from dagrl.scheduler.resources import Room
from dagrl.scheduler.syncs import Syncs
from dagrl.scheduler.task_state import Lane
from dagrl.scheduler.time_sharing import Turns
from dagrl.scheduler.versions import Versions


class Scheduler:
    """Decides, event by event. `first_step` is the step to begin with: 1, or the one after a checkpoint."""

    def __init__(self, plan: Plan, first_step: int = 1) -> None:
        self.plan = plan
        first = 0 if first_step == 1 and plan.validates(0) else first_step
        self.committed = first - 1
        """The newest committed step; -1 where the start itself has to be validated first."""
        self._trained = [name for name, executor in plan.executors.items() if executor.trained]
        self._lost: set[str] = set()
        self._neighbourhoods = Neighbourhoods(plan)
        self._steps = OpenSteps(plan, first, self._neighbourhoods)
        self._room = Room(plan, self._neighbourhoods)
        self._turns = Turns(plan)
        self._versions = Versions(plan, first_step)
        self._syncs = Syncs(plan, self._room, self._turns, self._versions, self._lost)
        self._commits = Commits(plan, first, self._steps, self._versions)
        self._generating = {
            name: [lane for lane in lanes if lane.task.generates]
            for name, lanes in self._steps.lanes_on.items()
            if plan.executors[name].weights_from
        }
        """Executors that follow others -> their tasks that generate."""

    @property
    def stopping(self) -> bool:
        """Whether the user wants the run to end."""
        return self._steps.stopping

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do or to wait for."""
        return self._steps.finished

    def version(self, executor: str) -> int | None:
        """Version of the weights that `executor` holds; None before its first sync, and where they are gone."""
        return self._versions.held(executor)

    def residency(self, executor: str) -> Residency:
        """How much of `executor` is in its devices' memory; on its way, what it comes from."""
        return self._turns.residency(executor)

    def workers_of(self, command: Command) -> tuple[str, ...]:
        """The executors that `command` keeps busy."""
        return self._room.workers_of(command)

    def start(self) -> list[Command]:
        """The first commands."""
        return self._decide()

    def handle(self, *events: Event) -> list[Command]:
        """Take note of `events`, in the order in which they have happened; what may start now."""
        for event in events:
            self._note(event)
        return self._decide()

    def _note(self, event: Event) -> None:
        match event:
            case ShardDone(step, task, shard, round_):
                self._steps.finish(Run(step, task, (shard,), round_))
            case RunDone(run):
                self._finish(run)
            case BatchShort(run):
                self._room.release(run)
                self._steps.begin_round(run.step)
            case WeightsSynced(sync):
                self._room.release(sync)
                self._versions.take(sync.follower, sync.version)
            case EngineReady(executor, residency):
                self._settle(executor, residency)
            case StateSaved(save):
                self._room.release(save)
                self._commits.finish(save)
            case StepCommitted(commit):
                self.committed = max(self.committed, commit.step)
                self._steps.close(commit.step)
                self._neighbourhoods.touch(*self._trained)
            case WorkerLost(executor):
                self._lose(executor)
            case StopRequested():
                self._steps.stop_after(self._commits.next)
                self._neighbourhoods.touch(*self.plan.executors)

    # -- what has happened

    def _finish(self, run: Run) -> None:
        self._room.release(run)
        self._steps.finish(run)
        lane = self._steps.lanes[run.task]
        if lane.ends_training(run):
            self._versions.finish_training(run.step, lane.task)

    def _settle(self, executor: str, residency: Residency) -> None:
        (move,) = self._room.under_way(executor)
        self._room.release(move)
        self._lost.discard(executor)
        self._arrive(executor, residency)

    def _lose(self, executor: str) -> None:
        assert executor != HOST and executor not in self._trained, f"{executor} cannot go on without its workers"
        for command in self._room.under_way(executor):
            self._room.release(command)
            if isinstance(command, Run):
                self._steps.give_back(command)
        self._lost.add(executor)
        self._arrive(executor, Residency.ASLEEP)
        self._neighbourhoods.touch(executor)

    def _arrive(self, executor: str, residency: Residency) -> None:
        self._turns.arrive(executor, residency)
        if residency is Residency.ASLEEP and self.plan.executors[executor].weights_from:
            self._versions.take(executor, None)

    # -- what may start now

    def _decide(self) -> list[Command]:
        commands: list[Command] = []
        # What begins may let something else begin: a run behind it, or a step.
        while begun := self._what_begins():
            commands += begun
        return commands

    def _what_begins(self) -> list[Command]:
        self._steps.open()
        touched = self._neighbourhoods.take_touched()
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
        """What brings the tasks of `executors` on, and their saves: sources, then the oldest step first."""
        queue: list[tuple[bool, int, bool, int, Lane | Save]] = []
        for name in executors:
            if not self._room.free(name) and not self._room.ahead(name) and not self._room.weights_coming(name):
                continue
            for lane in self._steps.lanes_on[name]:
                if (step := lane.oldest()) is not None:
                    queue.append((not lane.is_source, step, name == HOST, lane.place, lane))
            if (save := self._commits.due_save(name)) is not None:
                queue.append((True, save.step, False, len(self._steps.lanes) + self._trained.index(name), save))
        heapify(queue)
        while queue:
            rank, step, on_host, place, lane_or_save = heappop(queue)
            if isinstance(lane_or_save, Save):
                if self._room.free(lane_or_save.executor) and self._begin(lane_or_save, without_room):
                    yield lane_or_save
                continue
            yield from self._runs(step, lane_or_save, without_room)
            younger = lane_or_save.oldest()
            if younger is not None and younger > step:
                heappush(queue, (rank, younger, on_host, place, lane_or_save))

    def _runs(self, step: int, lane: Lane, without_room: list[OnEngine]) -> Iterator[Command]:
        """What brings a task on; what waits for nothing but room goes to `without_room`."""
        progress = lane.progress(step)
        while progress.ready:
            command = self._due(step, lane)
            if command is None or not self._begin(command, without_room):
                return
            yield command

    def _due(self, step: int, lane: Lane) -> Run | Sync | Restart | None:
        """What brings a task on if there is room: its run, what must come before it, or None where it must wait."""
        task, executor = lane.task, lane.executor
        if not self._in_turn(step, lane):
            return None
        run = Run(step, task.name, lane.progress(step).next, lane.round_in(step))
        if not self._room.free(executor.name):
            return run if self._may_be_sent_behind(step, lane) else None
        if executor.weights_from:
            if self._syncs.lacks_weights(step, task):
                return self._syncs.needed(step, task) or self._sync_behind_update(step, lane)
            if (sync := self._syncs.worthwhile(step, executor.name)) is not None:
                return sync
        if executor.name in self._lost:
            return Restart(step, executor.name)
        return run

    def _may_be_sent_behind(self, step: int, lane: Lane) -> bool:
        """Whether a task may be sent to workers that are at something else.

        A rollout behind its weights; else behind a run of the same step, if nobody waits for weights from there: who
        knows what else comes up until they are through.
        """
        name = lane.executor.name
        if lane.task.generates:
            coming = self._room.weights_coming(name)
            return coming is not None and coming.version >= self._versions.wanted(step, lane.task)
        ahead = self._room.ahead(name)
        follows_it = ahead is not None and ahead.step == step and lane.progress(step).takes_rest
        return follows_it and not self._syncs.is_wanted_of(name)

    def _sync_behind_update(self, step: int, lane: Lane) -> Sync | None:
        """What brings a task its weights when they are there, where its executor has nothing to do until then."""
        idle = self._steps.is_all_for(lane.executor.name, lane, step)
        return self._syncs.behind_update(step, lane.task) if idle else None

    def _in_turn(self, step: int, lane: Lane) -> bool:
        """Whether the order of the steps allows a task: on weights that move, and on a source that is read in order."""
        if lane.is_source:
            return lane.oldest_undone == step
        if lane.task.trains and step - 1 in self._steps:
            return False
        return self._versions.in_order(step, lane.task, lane.executor)

    def _first_syncs(self, executors: list[str]) -> Iterator[Command]:
        """Syncs for generators about to begin, before their sources, of other groups, go on with older steps."""
        for sync in self._next_syncs(executors):
            if self._syncs.is_between_groups(sync) and not self._turns.before(sync):
                self._room.occupy(sync)
                yield sync

    def _early_syncs(self, executors: list[str], without_room: list[OnEngine]) -> Iterator[Command]:
        """Syncs, and moves before them, for generators whose prompts are still being read."""
        for sync in self._next_syncs(executors):
            if self._begin(sync, without_room):
                yield sync

    def _next_syncs(self, executors: list[str]) -> Iterator[Sync]:
        """What generators that follow get before they begin, or go on: those with work, or with prompts to come."""
        for name in executors:
            for lane in self._generating.get(name, ()):
                step = lane.soon()
                due = self._due(step, lane) if step is not None else None
                if isinstance(due, Sync):
                    yield due

    def _refreshes(self, executors: list[str]) -> Iterator[Command]:
        """Syncs for generators in the midst of a run."""
        for name in executors if self.plan.in_flight else ():
            match self._room.under_way(name) if name in self._generating else ():
                case [Run(step, task, _)] if step in self._steps and self._steps.lanes[task].task.generates:
                    if (sync := self._syncs.worthwhile(step, name)) is not None:
                        self._room.occupy(sync)
                        yield sync

    def _begin(self, command: OnEngine, without_room: list[OnEngine]) -> bool:
        """Whether there is room for `command`, which is due; it begins then, and goes to `without_room` otherwise."""
        if self._turns.before(command):
            without_room.append(command)
            return False
        self._room.occupy(command)
        match command:
            case Run(step, name):
                lane = self._steps.lanes[name]
                lane.progress(step).start()
                self._steps.promise(command)
                if lane.task.trains:
                    self._versions.begin_training(step, lane.task, ends=lane.ends_training(command))
            case Save():
                self._commits.begin(command)
        return True

    def _restarts(self, executors: list[str]) -> Iterator[Command]:
        """Of lost executors that take no turns, before a step waits for them."""
        for name in executors:
            if name not in self._lost or self._turns.takes_turns(name) or not self._room.free(name):
                continue
            if (step := self._steps.next_for(name)) is not None:
                restart = Restart(step, name)
                self._room.occupy(restart)
                yield restart

    def _moves(self, without_room: list[OnEngine]) -> Iterator[Command]:
        """Make room for what is due, the oldest first; one thing at a time in a group."""
        for command in sorted(without_room, key=lambda command: command.step):
            if not self._room.free(*self._room.workers_of(command)):
                continue
            moves = self._turns.before(command)
            if any(move.down and self._has_older_work(move.executor, command.step) for move in moves):
                continue
            for move in moves:
                begun = (Sleep if move.down else Wake)(command.step, move.executor, move.to)
                self._room.occupy(begun)
                yield begun

    def _has_older_work(self, executor: str, step: int) -> bool:
        oldest = (lane.oldest() for lane in self._steps.lanes_on[executor])
        return any(each is not None and each < step for each in oldest)
