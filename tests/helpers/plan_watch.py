"""Holds commands and events against what must never be; knows nothing of the scheduler's state."""

from __future__ import annotations

from collections.abc import Iterable

from dagrl.config.residency import Residency
from dagrl.config.schema import Scope
from dagrl.scheduler.commands import Command, Commit, Restart, Run, Save, ShardDone, Sleep, Sync, Wake
from dagrl.scheduler.plan import HOST, Executor, Plan, PlannedTask, Rows
from dagrl.scheduler.time_sharing import residency_after_start, start_chains

ASLEEP, WEIGHTS, AWAKE = Residency.ASLEEP, Residency.WEIGHTS, Residency.AWAKE
_Row = tuple[int, str, int, int]
"""Step, task, shard, round."""


class Watch:
    """Follows one run from `first_step`."""

    def __init__(self, plan: Plan, first_step: int) -> None:
        self.plan, self.first_step = plan, 0 if first_step == 1 and plan.validate_first else first_step
        self.run_until = self.first_step
        """All steps before it are done."""
        self.task_of = {task.name: task for task in plan.tasks}
        self.residency = dict.fromkeys(plan.executors, AWAKE)
        for chain in start_chains(plan):
            self.residency |= {name: residency_after_start(plan.executors[name], chain) for name in chain}
        self.version = {name: None if each.weights_from else first_step - 1 for name, each in plan.executors.items()}
        self.training: dict[str, Run] = {}
        """Executor -> the last piece of an update that has begun and is not over."""
        self.lost: set[str] = set()
        self.busy: dict[str, list[Command]] = {name: [] for name in plan.executors}
        self.newest_step, self.last_step = self.first_step, plan.steps
        self.running: set[_Row] = set()
        self.arrived: set[_Row] = set()
        self.round: dict[int, int] = {}
        """Step -> the round in which it is, where that is not the first."""
        self.saves: set[tuple[int, str]] = set()
        self.commits: list[int] = []
        self.committed: set[int] = set()
        self.saved: list[int] = []
        """Steps with a whole checkpoint."""
        self.moves = self.restarts = self.in_flight = 0

    def begin(self, command: Command) -> None:
        for name in self.workers(command):
            self._is_free(name, command)
            self.busy[name].append(command)
        match command:
            case Run():
                self._begin_run(command, self.task_of[command.task])
            case Save(step, name):
                self._may_work(name)
                assert self.version[name] == step and name not in self.training
                assert (step, name) not in self.saves
                self.saves.add((step, name))
            case Sync():
                self._begin_sync(command)
            case Sleep(_, name, residency):
                assert residency < self.residency[name] and self.plan.executors[name].sleeps
                self.moves += 1
            case Wake(_, name, residency):
                assert residency > self.residency[name] and self.plan.executors[name].sleeps
                assert name not in self.lost, "no worker is left to wake"
                # Only when all others have given back what they must.
                most = ASLEEP if residency is AWAKE else WEIGHTS
                assert all(self.residency[other] <= most for other in self._other_sleepers(name)), command
                assert not any(isinstance(each, Sleep) for each in self._under_way(name)), command
                self.moves += 1
            case Restart(_, name):
                assert name in self.lost
                assert all(self.residency[other] is ASLEEP for other in self._other_sleepers(name)), command
                self.restarts += 1
            case Commit(step, save):
                self.commits.append(step)
                trained = {name for name, each in self.plan.executors.items() if each.trained}
                assert not save or {name for saved, name in self.saves if saved == step} == trained

    def shard(self, event: ShardDone) -> None:
        """A shard of a run that goes on has come."""
        self._arrive((event.step, event.task, event.shard, event.round))

    def short(self, run: Run) -> None:
        """A filter has had a round in vain: all that was before it was through with it."""
        self.busy[HOST].remove(run)
        before = [each for each in self.plan.tasks if each.in_rounds and not each.selects]
        assert self._rows(run.step, before) <= self.arrived
        self.running -= self._rows(run.step, [self.task_of[run.task]])
        self.round[run.step] = run.round + 1

    def end(self, command: Command) -> None:
        for name in self.workers(command):
            self.busy[name].remove(command)
        match command:
            case Run(step, name, shards):
                for shard in shards:
                    if (step, name, shard, command.round) not in self.arrived:
                        self._arrive((step, name, shard, command.round))
                task = self.task_of[name]
                if task.trains and self._rows(step, [task]) <= self.arrived:
                    self.version[task.executor] = step
                    del self.training[task.executor]
            case Sync(_, follower, _, version):
                self.version[follower] = version
            case Commit(step, save):
                self.saved += [step] * save
                assert step > max(self.committed, default=-1), "metrics are written in the order of the steps"
                self.committed.add(step)
            case Restart(_, name):
                self.lost.remove(name)
                self.residency[name] = AWAKE
            case Sleep(_, name, residency) | Wake(_, name, residency):
                self.residency[name] = residency
                if residency is ASLEEP and self.plan.executors[name].weights_from:
                    self.version[name] = None
        for group in {each.group for each in self.plan.executors.values()}:
            sleepers = [each.name for each in self.plan.executors.values() if each.group == group and each.sleeps]
            held = sorted((self.residency[name] for name in sleepers), reverse=True)
            assert held[:1] != [AWAKE] or not any(held[1:]), f"two of {sleepers} hold {held}"

    def stop(self) -> None:
        """The oldest step not yet at its commit is the last one."""
        self.last_step = max(self.commits, default=self.first_step - 1) + 1

    def end_with(self, step: int) -> None:
        """No data are left after this step."""
        self.last_step = min(self.last_step, step)

    def lose(self, name: str) -> list[Command]:
        """Workers of `name` are gone, and with them what was under way there, which is returned."""
        gone = list(self.busy[name])
        for command in gone:
            for worker in self.workers(command):
                self.busy[worker].remove(command)
            if isinstance(command, Run):
                self.running -= {(command.step, command.task, shard, command.round) for shard in command.shards}
        self.lost.add(name)
        self.residency[name] = ASLEEP
        if self.plan.executors[name].weights_from:
            self.version[name] = None
        return gone

    def overlooked(self) -> list[_Row]:
        """Rows without a reason to wait, although an idle executor could take them."""
        started = self.running | self.arrived
        return [
            row
            for step in range(self.run_until, self.newest_step + 1)
            for task in self.plan.tasks_of(step)
            if task.needs and task.scope is not Scope.BATCH and self._is_its_own_master(task.executor)
            for shard in range(self.plan.shards)
            if (row := (step, task.name, shard, self.round_of(step, task))) not in started
            and self._inputs(step, task, [shard]) <= self.arrived
        ]

    def round_of(self, step: int, task: PlannedTask) -> int:
        return self.round.get(step, 0) if task.in_rounds else 0

    def _rows(self, step: int, tasks: Iterable[PlannedTask], shards: Iterable[int] | None = None) -> set[_Row]:
        """Of the round in which the step is."""
        shards = range(self.plan.shards) if shards is None else shards
        return {(step, task.name, shard, self.round_of(step, task)) for task in tasks for shard in shards}

    def _inputs(self, step: int, task: PlannedTask, shards: Iterable[int]) -> set[_Row]:
        """What a task must have for these shards; of what is in rounds only what a filter has let pass."""
        needs = [self.task_of[need] for need in task.needs]
        found = self._rows(step, needs, shards)
        if not task.in_rounds and any(need.in_rounds for need in needs):
            found |= self._rows(step, [each for each in self.plan.tasks if each.selects])
        return found

    def is_behind(self, command: Command) -> bool:
        """Whether `command` waits until its workers are through with something else."""
        if isinstance(command, Sync):
            return self.busy[command.source][0] is not command
        if isinstance(command, Run) and self.task_of[command.task].generates:
            return self._coming_to(self.task_of[command.task].executor) is not None
        return isinstance(command, Run) and self._ahead_of(command) not in (None, command)

    def _coming_to(self, follower: str) -> Sync | None:
        """The sync that an executor is at, and not in the midst of a run."""
        first = self.busy[follower][0] if self.busy[follower] else None
        return first if isinstance(first, Sync) and first.follower == follower else None

    def _ahead_of(self, run: Run) -> Command | None:
        """What the executor of a run is at, where it takes one run after the other."""
        name = self.task_of[run.task].executor
        in_a_row = name != HOST and not self.plan.executors[name].weights_from
        return self.busy[name][0] if in_a_row and self.busy[name] else None

    def _promised_to(self, run: Run) -> set[_Row]:
        """What a trained executor will have made when it comes to this run, which is being sent there."""
        ahead = self._ahead_of(run)
        if not isinstance(ahead, Run) or ahead == run or self.task_of[ahead.task].in_rounds:
            return set()
        task = self.task_of[ahead.task]
        return self._rows(ahead.step, [task], ahead.shards) if self.plan.executors[task.executor].trained else set()

    def _is_its_own_master(self, name: str) -> bool:
        """Whether an executor has hands free, and neither group nor weights to share."""
        executor = self.plan.executors[name]
        if executor.trained or executor.weights_from or name in self.lost or len(self.busy[name]) >= executor.ranks:
            return False
        return name == HOST or all(
            other.group != executor.group or other.name == name for other in self.plan.executors.values()
        )

    def workers(self, command: Command) -> list[str]:
        match command:
            case Run(_, task, _):
                return [self.task_of[task].executor]
            case Sync(_, follower, source, _):
                return [follower, source]
            case Commit():
                return []
        return [command.executor]

    # -- runs

    def _begin_run(self, run: Run, task: PlannedTask) -> None:
        self.newest_step = max(self.newest_step, run.step)
        assert run.step <= self.last_step, f"{run} after a stop"
        assert run.round == self.round_of(run.step, task)
        rows = self._rows(run.step, [task], run.shards)
        assert len(rows) == len(run.shards) and not rows & (self.running | self.arrived), f"{run} has rows twice"
        if task.scope is Scope.BATCH:
            others = self._rows(run.step, [task]) - rows
            pieces = task.pieces or (tuple(range(self.plan.shards)),)
            assert run.shards in pieces
            before = self._rows(
                run.step, [task], [shard for piece in pieces[: pieces.index(run.shards)] for shard in piece]
            )
            assert before <= self.arrived and not (others - before) & (self.arrived | self.running), (
                f"{run} out of turn"
            )
        elif not task.streams:
            assert len(run.shards) == 1
        needed = range(self.plan.shards) if task.streams else run.shards
        assert self._inputs(run.step, task, needed) <= self.arrived | self._promised_to(run), f"{run}: inputs"
        if not task.needs and task.in_rounds:
            filters = [each for each in self.plan.tasks if each.selects]
            for step in range(max(1, self.run_until), run.step):
                assert self._rows(step, filters) <= self.arrived, f"{run} before it is known where the data go on"
        self.running |= rows
        assert all(self._is_run(step) for step in range(self.first_step, run.step - self.plan.max_staleness)), run
        self._may_work(task.executor)
        self._has_weights(run, task, self.plan.executors[task.executor])

    def _is_run(self, step: int) -> bool:
        """Whether nothing of a step is left, but what updates are at."""
        while self.run_until < step + 1 and (
            self._rows(self.run_until, self.plan.tasks_of(self.run_until)) <= self.arrived
        ):
            self.run_until += 1
        left = self._rows(step, self.plan.tasks_of(step)) - self.arrived
        return step < self.run_until or all(row in self.running and self.task_of[row[1]].trains for row in left)

    def _has_weights(self, run: Run, task: PlannedTask, executor: Executor) -> None:
        version = self.version[executor.name]
        if task.generates and (coming := self._coming_to(executor.name)):
            version = coming.version
        if executor.weights_from:
            assert version is not None, f"{run} without weights"
            oldest = run.step if task.rows is Rows.VALIDATION else max(0, run.step - 1 - self.plan.max_staleness)
            # What is left of a run that was lost may have to do with the weights that there are.
            assert version >= oldest, f"{run} on version {version}"
        elif executor.trained and not task.frozen:
            assert version >= (run.step if task.rows is Rows.VALIDATION else run.step - 1)
            begun = self.training.get(executor.name, run)
            assert (begun.step, begun.task) == (run.step, run.task), f"{run} in the midst of {begun}"
        if task.trains:
            assert version == run.step - 1
            assert run.step == self.first_step or run.step - 1 in self.committed, f"{run} before the commit before it"
            self.training[executor.name] = run

    def _arrive(self, row: _Row) -> None:
        assert row in self.running and row not in self.arrived, f"{row} comes out of nowhere"
        self.running.remove(row)
        self.arrived.add(row)

    # -- weights and memory

    def _begin_sync(self, sync: Sync) -> None:
        follower, source = sync.follower, sync.source
        assert sync.step <= self.last_step, f"{sync} after a stop"
        promised = self._promised_by(source)
        assert sync.version == (self.version[source] if promised is None else promised)
        assert not {follower, source} & self.lost
        held = self.version[follower]
        if promised is not None:
            assert len(self.busy[source]) == 2 and self.busy[follower] == [sync], f"{sync} behind {self.busy[source]}"
        elif source in self.training:
            assert held is None and sync.step <= self.training[source].step, f"{sync} in the midst of training"
        assert held is None or held < sync.version
        if len(self.busy[follower]) > 1:
            self.in_flight += 1
        together = self.plan.executors[follower].group == self.plan.executors[source].group
        for end in (follower, source):
            if self.plan.executors[end].sleeps:
                assert self.residency[end] is WEIGHTS or (self.residency[end] is AWAKE and not together)
                assert all(
                    self.residency[other] is ASLEEP for other in {*self._other_sleepers(end)} - {follower, source}
                )

    def _promised_by(self, source: str) -> int | None:
        """The version that an update ends with that its executor is at, and at nothing else but a sync behind it."""
        update = self.busy[source][0] if self.busy[source] else None
        if not isinstance(update, Run) or not self.task_of[update.task].trains:
            return None
        task = self.task_of[update.task]
        others = self._rows(update.step, [task]) - self._rows(update.step, [task], update.shards)
        return update.step if others <= self.arrived else None

    def _may_work(self, name: str) -> None:
        assert name not in self.lost
        assert self.residency[name] is AWAKE
        assert all(self.residency[other] is ASLEEP for other in self._other_sleepers(name))

    # -- who is busy

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
        beside = [each for each in self._under_way(name) if not self._may_be_behind(name, command, each)]
        if not self._is_in_flight(name, command):
            assert not any(each in beside for each in self.busy[name]), f"{command} while {self.busy[name]}"
        for other in beside:
            together = (isinstance(command, Sleep) and isinstance(other, Sleep)) or (
                isinstance(command, Wake) and isinstance(other, Wake)
            )
            assert other is command or together or self._is_in_flight(name, command), f"{command} beside {other}"

    def _may_be_behind(self, name: str, command: Command, other: Command) -> bool:
        """Whether `command` may be sent to workers that are at `other`.

        Runs of a step, two of them at most; a sync of weights that an update will have made; a rollout on those that
        come.
        """
        if isinstance(command, Sync) and command.source == name:
            return self._promised_by(name) == command.version and other is self.busy[name][0]
        if isinstance(command, Run) and self.task_of[command.task].generates:
            return self.busy[name] == [other] and other is self._coming_to(name)
        if not (isinstance(command, Run) and isinstance(other, Run)):
            return False
        return self._ahead_of(command) == other and len(self.busy[name]) == 1 and command.step == other.step

    def _is_in_flight(self, name: str, command: Command) -> bool:
        """Whether `command` is a sync for `name` in the midst of one run, which may go on."""
        if not (self.plan.in_flight and isinstance(command, Sync) and command.follower == name):
            return False
        return all(isinstance(each, Run) and self.task_of[each.task].generates for each in self._under_way(name))
