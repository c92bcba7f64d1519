"""The scheduler: a state machine that says what may run now. Events in, commands out; no I/O, no clock, no Ray.

A *step* is one pass through the DAG. Its batch is split into *shards* of whole groups; a row-wise task runs on each
shard as soon as its inputs are there, a batch task when all are. Synchronous, colocated and asynchronous training
differ only in `Plan.max_staleness` and in who shares a group:

- A step opens once step ``s - 1 - max_staleness`` has nothing left to run.
- A task runs when its inputs are done (a source: when the earlier steps have theirs), its executor has a free worker,
  and no other executor of its group is busy.
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
- Sources come before what older steps have for the host: they are short, and a generator may wait for them.
- With `Plan.in_flight` a generator that is at work gets newer weights as soon as its source has a moment for that.
- What has lost its workers is restarted: at once where nobody of its group sleeps, or when a step waits for it and the
  others are asleep. What the workers had not brought yet is run again, after a sync.
- A step that saves saves each trained executor as soon as it has trained it, while it is still awake.
- A step whose tasks and saves are all done is committed, in order.
- After `StopRequested` the oldest step not yet at its commit is finished, saved and committed; nothing else starts.

What an event costs depends on what it may unlock, not on how many shards or steps are open: only the neighbourhood of
whatever became free, ready or newer is looked at, and of each task there only the oldest step that has work for it.

Followed by `dagrl.runtime.driver`, which carries out the commands and reports the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from dagrl.plan.commands import (
    BatchShort,
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
from dagrl.plan.plan import HOST, Plan
from dagrl.plan.progress import Lane, OpenStep, lanes_of
from dagrl.plan.room import Room, neighbourhoods
from dagrl.plan.syncs import Syncs
from dagrl.plan.turns import Move, Turns
from dagrl.plan.versions import Versions
from dagrl.spec.residency import Residency

_OnEngine = Run | Sync | Save | Restart
"""What needs room in the memory of a group's devices."""


class Scheduler:
    """Decides, event by event. `first_step` is the step to begin with: 1, or the one after a checkpoint."""

    def __init__(self, plan: Plan, first_step: int = 1) -> None:
        self.plan = plan
        self.stopping = False
        self.committed = first_step - 1
        """The newest committed step."""
        self._next_step = 0 if first_step == 1 and plan.validates(0) else first_step
        self._unfinished = self._uncommitted = self._next_step
        """The oldest steps that have something left to be run, and whose commit was not issued."""
        self._open: dict[int, OpenStep] = {}
        self._trained = [name for name, executor in plan.executors.items() if executor.trained]
        self._room = Room(plan)
        self._turns = Turns(plan)
        self._versions = Versions(plan, first_step)
        self._lost: set[str] = set()
        self._syncs = Syncs(plan, self._room, self._turns, self._versions, self._lost)
        self._lanes = lanes_of(plan, self._open)
        self._lanes_of = {
            name: [lane for lane in self._lanes.values() if lane.task.executor == name] for name in plan.executors
        }
        self._neighbourhoods = neighbourhoods(plan)
        self._place_of = {name: place for place, names in enumerate(self._neighbourhoods) for name in names}
        self._touched = set(self._place_of.values())
        """Places of the neighbourhoods in which something may begin that could not before."""

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do or to wait for."""
        return not self._open and (self.stopping or self._next_step > self.plan.steps)

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

    def handle(self, event: Event) -> list[Command]:
        """Take note of `event`; what may start now."""
        match event:
            case ShardDone(step, task, shard, round_):
                self._mark_done(Run(step, task, (shard,), round_))
            case RunDone(run):
                self._finish_run(run)
            case BatchShort(run):
                self._release(run)
                self._begin_round(run.step)
            case WeightsSynced(sync):
                self._release(sync)
                self._versions.take(sync.follower, sync.version)
            case EngineReady(executor, residency):
                self._settle(executor, residency)
            case StateSaved(save):
                self._release(save)
                self._open[save.step].saved.add(save.executor)
            case StepCommitted(commit):
                self.committed = max(self.committed, commit.step)
                del self._open[commit.step]
                self._touch(*self._trained)
            case WorkerLost(executor, _):
                self._lose(executor)
            case StopRequested():
                self._stop()
        return self._decide()

    # -- what has happened

    def _finish_run(self, run: Run) -> None:
        lane = self._lanes[run.task]
        self._release(run)
        self._mark_done(run)
        if lane.task.trains and run.shards == lane.cut.last_piece:
            self._versions.finish_training(run.step, lane.task)

    def _mark_done(self, run: Run) -> None:
        """What `run` is for is done."""
        if not self._counts(run):
            return
        lane, state = self._lanes[run.task], self._open[run.step]
        new = state.tasks[run.task].finish(run.shards)
        if not new:
            return
        if not state.tasks[run.task].left:
            state.left -= 1
            lane.leave(run.step)
        self._note_ready(lane, run.step)
        for reader in lane.readers:
            state.tasks[reader.task.name].supply(new)
            self._note_ready(reader, run.step)

    def _counts(self, run: Run) -> bool:
        """Whether the step of `run` was not dropped by a stop, and it is not of an earlier round."""
        return run.step in self._open and run.round == self._lanes[run.task].round_in(run.step)

    def _begin_round(self, step: int) -> None:
        if step not in self._open:  # dropped by a stop
            return
        state = self._open[step]
        state.round += 1
        for name, lane in self._lanes.items():
            if lane.task.in_rounds:
                state.left += not state.tasks[name].left
                state.tasks[name] = lane.cut.begin()
                self._note_ready(lane, step)

    def _note_ready(self, lane: Lane, step: int) -> None:
        if self._open[step].tasks[lane.task.name].ready:
            lane.note(step)
            self._touch(lane.task.executor)

    def _settle(self, executor: str, residency: Residency) -> None:
        (move,) = self._room.under_way(executor)
        self._release(move)
        self._turns.arrive(executor, residency)
        self._lost.discard(executor)
        if residency is Residency.ASLEEP and self.plan.executors[executor].follows:
            self._versions.take(executor, None)

    def _lose(self, executor: str) -> None:
        assert executor != HOST and executor not in self._trained, f"{executor} cannot go on without its workers"
        for command in self._room.under_way(executor):
            self._release(command)
            if isinstance(command, Run) and self._counts(command):
                self._open[command.step].tasks[command.task].give_back(command.shards)
                self._note_ready(self._lanes[command.task], command.step)
        self._lost.add(executor)
        self._turns.arrive(executor, Residency.ASLEEP)
        if self.plan.executors[executor].follows:
            self._versions.take(executor, None)
        self._touch(executor)

    def _stop(self) -> None:
        self.stopping = True
        for step in [
            step for step, state in self._open.items() if not state.commit_issued and step > self._uncommitted
        ]:
            del self._open[step]
        self._touch(*self.plan.executors)

    def _release(self, command: Command) -> None:
        self._room.release(command)
        self._touch(*self._room.workers_of(command))

    def _touch(self, *executors: str) -> None:
        for name in executors:
            self._touched.add(self._place_of[name])

    # -- what may start now

    def _decide(self) -> list[Command]:
        self._open_steps()
        touched = [name for place in sorted(self._touched) for name in self._neighbourhoods[place]]
        self._touched.clear()
        without_room: list[_OnEngine] = []
        return [
            *self._refreshes(touched),
            *self._first_syncs(touched),
            *self._work(touched, without_room),
            *self._early_syncs(touched, without_room),
            *self._restarts(touched),
            *self._commits(),
            *self._moves(without_room),
        ]

    def _open_steps(self) -> None:
        while not self.stopping and self._next_step <= self.plan.steps:
            bound = self._next_step - self.plan.max_staleness
            while self._unfinished < bound and not self._has_left(self._unfinished):
                self._unfinished += 1
            if self._unfinished < bound:
                return
            self._open_step(self._next_step)
            self._next_step += 1

    def _open_step(self, step: int) -> None:
        lanes = [self._lanes[task.name] for task in self.plan.tasks_of(step)]
        self._open[step] = OpenStep({lane.task.name: lane.cut.begin() for lane in lanes}, left=len(lanes))
        for lane in lanes:
            lane.enter(step)
            self._note_ready(lane, step)

    def _has_left(self, step: int) -> bool:
        """Whether something of `step` is still to be run."""
        return step in self._open and self._open[step].left > 0

    def _work(self, executors: list[str], without_room: list[_OnEngine]) -> Iterator[Command]:
        """What brings the tasks of `executors` on, and their saves: sources, then the oldest step first.

        Sources are short, and a generator may wait for them while the host has older steps to go on with.
        """
        queue: list[tuple[bool, int, int, Lane | Save]] = []
        for name in executors:
            if not self._room.free(name):
                continue
            for lane in self._lanes_of[name]:
                if (step := lane.oldest()) is not None:
                    queue.append((not lane.is_source, step, lane.place, lane))
            if (save := self._due_save(name)) is not None:
                queue.append((True, save.step, len(self._lanes) + self._trained.index(name), save))
        heapify(queue)
        while queue:
            rank, step, place, lane_or_save = heappop(queue)
            if isinstance(lane_or_save, Save):
                if self._room.free(lane_or_save.executor) and self._begin(lane_or_save, without_room):
                    yield lane_or_save
                continue
            yield from self._runs(step, lane_or_save, without_room)
            younger = lane_or_save.oldest()
            if younger is not None and younger > step:
                heappush(queue, (rank, younger, place, lane_or_save))

    def _runs(self, step: int, lane: Lane, without_room: list[_OnEngine]) -> Iterator[Command]:
        """What brings a task on; what waits for nothing but room goes to `without_room`."""
        progress = self._open[step].tasks[lane.task.name]
        while progress.ready:
            command = self._due(step, lane)
            if command is None or not self._begin(command, without_room):
                return
            yield command

    def _due(self, step: int, lane: Lane) -> Run | Sync | Restart | None:
        """What brings a task on if there is room: its run, what must come before it, or None where it must wait."""
        task, executor = lane.task, lane.executor
        if not self._room.free(executor.name) or not self._in_turn(step, lane):
            return None
        if executor.follows:
            if self._syncs.lacks_weights(step, task):
                return self._syncs.needed(step, task)
            if (sync := self._syncs.worthwhile(step, executor.name)) is not None:
                return sync
        if executor.name in self._lost:
            return Restart(step, executor.name)
        return Run(step, task.name, self._open[step].tasks[task.name].next, lane.round_in(step))

    def _in_turn(self, step: int, lane: Lane) -> bool:
        """Whether the order of the steps allows a task: on weights that move, and on a source that is read in order."""
        if lane.is_source:
            return lane.oldest_undone == step
        if lane.task.trains and step - 1 in self._open:
            return False
        return self._versions.in_order(step, lane.task, lane.executor)

    def _first_syncs(self, executors: list[str]) -> Iterator[Command]:
        """Syncs for generators about to begin, before their sources, of other groups, go on with older steps."""
        for lane in self._followers_lanes(executors):
            source = self.plan.executors[lane.executor.follows or ""]
            step = self._begins_soon(lane) if source.group != lane.executor.group else None
            sync = self._due(step, lane) if step is not None else None
            if isinstance(sync, Sync) and not self._moves_before(sync):
                self._room.occupy(sync)
                yield sync

    def _early_syncs(self, executors: list[str], without_room: list[_OnEngine]) -> Iterator[Command]:
        """Syncs, and moves before them, for generators of the same group while their prompts are being read."""
        for lane in self._followers_lanes(executors):
            step = self._begins_soon(lane) if lane.oldest() is None else None
            sync = self._due(step, lane) if step is not None else None
            if isinstance(sync, Sync) and self._begin(sync, without_room):
                yield sync

    def _followers_lanes(self, executors: list[str]) -> Iterator[Lane]:
        for name in executors:
            if self.plan.executors[name].follows:
                yield from (lane for lane in self._lanes_of[name] if lane.task.generates)

    def _begins_soon(self, lane: Lane) -> int | None:
        """The oldest step in which a task is ready, or will be when its prompts are read."""
        step = lane.oldest()
        if step is None and lane.waits_for_sources_alone:
            name = lane.task.name
            return next(
                (step for step, state in self._open.items() if name in state.tasks and state.tasks[name].left), None
            )
        return step

    def _refreshes(self, executors: list[str]) -> Iterator[Command]:
        """Syncs for generators in the midst of a run."""
        for name in executors if self.plan.in_flight else ():
            match self._room.under_way(name) if self.plan.executors[name].follows else ():
                case [Run(step, task, _)] if self._lanes[task].task.generates:
                    if (sync := self._syncs.worthwhile(step, name)) is not None:
                        self._room.occupy(sync)
                        yield sync

    def _begin(self, command: _OnEngine, without_room: list[_OnEngine]) -> bool:
        """Whether there is room for `command`, which is due; it begins then, and goes to `without_room` otherwise."""
        if self._moves_before(command):
            without_room.append(command)
            return False
        self._room.occupy(command)
        match command:
            case Run(step, name):
                self._open[step].tasks[name].start()
                if self._lanes[name].task.trains:
                    self._versions.begin_training(step, self._lanes[name].task)
            case Save(step, executor):
                self._open[step].saves_begun.add(executor)
        return True

    def _restarts(self, executors: list[str]) -> Iterator[Command]:
        """Of lost executors that take no turns, before a step waits for them."""
        for name in executors:
            if name not in self._lost or self._turns.takes_turns(name) or not self._room.free(name):
                continue
            steps = (step for step in sorted(self._open) if self._has_left_for(step, name))
            step = next(steps, None if self.stopping or self._next_step > self.plan.steps else self._next_step)
            if step is not None:
                restart = Restart(step, name)
                self._room.occupy(restart)
                yield restart

    def _has_left_for(self, step: int, executor: str) -> bool:
        tasks = self._open[step].tasks
        return any(lane.task.name in tasks and tasks[lane.task.name].left for lane in self._lanes_of[executor])

    def _due_save(self, executor: str) -> Save | None:
        step = self._versions.held(executor)
        if executor not in self._trained or step not in self._open or not self._is_saved(step):
            return None
        state = self._open[step]
        return None if state.commit_issued or executor in state.saves_begun else Save(step, executor)

    def _is_saved(self, step: int) -> bool:
        return step > 0 and (self.plan.saves(step) or self.stopping)

    def _commits(self) -> Iterator[Command]:
        while (state := self._open.get(self._uncommitted)) is not None and not state.left:
            save = self._is_saved(self._uncommitted)
            if save and not state.saved.issuperset(self._trained):
                return
            state.commit_issued = True
            yield Commit(self._uncommitted, save)
            self._uncommitted += 1

    def _moves(self, without_room: list[_OnEngine]) -> Iterator[Command]:
        """Make room for what is due, the oldest first; one thing at a time in a group."""
        for command in sorted(without_room, key=lambda command: command.step):
            if not self._room.free(*self._room.workers_of(command)):
                continue
            moves = self._moves_before(command)
            if any(move.down and self._has_older_work(move.executor, command.step) for move in moves):
                continue
            for move in moves:
                begun = (Sleep if move.down else Wake)(command.step, move.executor, move.to)
                self._room.occupy(begun)
                yield begun

    def _moves_before(self, command: _OnEngine) -> list[Move]:
        match command:
            case Run(_, task, _):
                return self._turns.before_work(self._lanes[task].task.executor)
            case Sync(_, follower, source, _):
                return self._turns.before_sync(follower, source)
            case Save(_, executor):
                return self._turns.before_work(executor)
            case Restart(_, executor):
                return self._turns.before_restart(executor)

    def _has_older_work(self, executor: str, step: int) -> bool:
        oldest = (lane.oldest() for lane in self._lanes_of[executor])
        return any(each is not None and each < step for each in oldest)
