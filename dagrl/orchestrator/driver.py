"""The main loop: carries out the scheduler's commands on the workers, and tells it what has happened.

    scheduler --Run, Sync, Sleep, ...--> driver --work--> workers
    scheduler <--ShardDone, RunDone, ...-- driver <--blocks (metadata and refs)-- workers

Each command is a coroutine of its own, so that all that may run does; each ends by reporting an event. The first one
that fails ends the run, unless it is that workers of a generator are lost: those are started again (`losses`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from dagrl.backends.base import Appetite
from dagrl.config.residency import Residency
from dagrl.config.schema import Pipeline
from dagrl.graph.rollouts import rollouts
from dagrl.orchestrator.folder.checkpoint import RunState
from dagrl.orchestrator.folder.identity import model_identity
from dagrl.orchestrator.folder.run_folder import RunFolder
from dagrl.orchestrator.folder.scoring import Scoring
from dagrl.orchestrator.sampling import Books, Sampling
from dagrl.orchestrator.saving import Saving
from dagrl.orchestrator.steps.batch_index import Ledger
from dagrl.orchestrator.steps.dispatch import share_out
from dagrl.orchestrator.steps.dynamic_sampling import Rounds
from dagrl.orchestrator.steps.kl_control import KlControl
from dagrl.orchestrator.steps.partial_rollouts import Carried
from dagrl.orchestrator.steps.record import Activity, StepRecord
from dagrl.scheduler.commands import (
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
)
from dagrl.scheduler.plan import HOST, Executor, Plan, PlannedTask, Rows
from dagrl.scheduler.scheduler import Scheduler
from dagrl.tracking import Trackers
from dagrl.tracking.timeline import complete_event
from dagrl.workers.errors import RunError, WorkerLostError
from dagrl.workers.groups.cpu_pool import IdleHosts
from dagrl.workers.groups.offload import Moves
from dagrl.workers.groups.queued_calls import runs_ahead_end
from dagrl.workers.groups.restart_policy import Restarts
from dagrl.workers.groups.task_group import together
from dagrl.workers.groups.weight_syncs import WeightSyncs
from dagrl.workers.groups.worker_failures import Losses
from dagrl.workers.groups.worker_group import Fleet, Member
from dagrl.workers.groups.worker_info import write_workers
from dagrl.workers.messages import Block


class Driver:
    """One run, from its first step to its last. `position`: prompts of the data set used so far, over all epochs."""

    def __init__(
        self,
        pipeline: Pipeline,
        plan: Plan,
        scheduler: Scheduler,
        fleet: Fleet,
        folder: RunFolder,
        trackers: Trackers,
        restarts: Restarts,
        position: int,
        carried: Iterable[int],
        kl_control: KlControl,
    ) -> None:
        """`carried`: places in the data set before `position`, of prompts that come first in the next step."""
        self.pipeline = pipeline
        self.plan = plan
        self.scheduler = scheduler
        self.fleet = fleet
        self.folder = folder
        self.trackers = trackers
        self.position = position
        self._carried = Carried.of_checkpoint(carried)
        self._kl = kl_control
        self._is_partial = any(node.partial_rollout for node in rollouts(pipeline).values())
        """Whether prompts that a step does not finish are gone on with."""
        self._sampled: dict[str, int] = {}
        """Worker -> tokens that its engine has sampled, as it last said."""
        self._appetites: dict[tuple[str, int], Appetite] = {}
        """Engine and longest row -> how much its servers take at a time."""
        self.overlong = {"dropped": 0, "cut": 0}
        """Training prompts that were longer than ``max_prompt_tokens``, by what was done about them."""
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._running: dict[asyncio.Task[Any], Command] = {}
        self._restarts = restarts
        bound = pipeline.run.node_timeout_s
        self._losses = Losses(fleet, restarts, bound, self._running, scheduler.workers_of)
        self._samplings: dict[tuple[int, str], Sampling] = {}
        """Runs that have lost servers, by step and task: to be gone on with."""
        self._sampling_on: dict[str, Sampling] = {}
        """Executor -> the rollout that it is at, or that stands behind a sync there."""
        self._ledgers: dict[tuple[int, Rows], Ledger] = {}
        self._last_commit: float | None = None
        self._records: dict[int, StepRecord] = {}
        self._idle_hosts = IdleHosts(())
        self._moves = Moves(fleet, plan, scheduler.residency)
        self._syncs = WeightSyncs(fleet, pipeline)
        self._rounds = Rounds(pipeline, plan)
        self._scoring = Scoring(pipeline.run.keep_best, plan, trackers.note)
        self._saving = Saving(
            fleet,
            plan,
            folder.checkpoints,
            in_background=pipeline.run.async_save,
            timeout_s=bound,
            draw=self._draw,
            report=self._report,
        )

    async def train(self) -> None:
        """Run until the scheduler has nothing left to do; raises the first failure of a command."""
        self._idle_hosts = IdleHosts(self.fleet.members(HOST))
        try:
            commands = self.scheduler.start()
            while not self.scheduler.finished:
                for command in commands:
                    self._begin(command)
                commands = self.scheduler.handle(*await self._next_events())
            await self._saving.last()
        finally:
            for task in self._running:
                task.cancel()
            self._saving.cancel()

    def request_stop(self) -> None:
        """End at the next step boundary, with a checkpoint."""
        self._events.put_nowait(StopRequested())

    async def _next_events(self) -> list[Event]:
        """All that have happened; at least one: what two of them allow together may be one call, and not two."""
        # Every command has a bound, so this has one too.
        assert self._running or not self._events.empty(), "nothing is under way, and the run is not over"
        happened = [await self._events.get()]
        while not self._events.empty():
            happened.append(self._events.get_nowait())
        events: list[Event] = []
        for each in happened:
            if isinstance(each, BaseException):
                raise each
            events.append(each)
        return events

    def _begin(self, command: Command) -> None:
        task = asyncio.get_running_loop().create_task(self._carry_out(command))
        self._running[task] = command
        task.add_done_callback(self._running.pop)
        task.add_done_callback(self._report)

    async def _carry_out(self, command: Command) -> Event | None:
        actions: dict[type, Callable[[Any], Coroutine[Any, Any, Event]]] = {
            Run: self._run,
            Sync: self._sync,
            Sleep: self._move,
            Wake: self._move,
            Restart: self._restart,
            Save: self._save,
            Commit: self._commit,
        }
        try:
            try:
                return await actions[type(command)](command)
            except WorkerLostError as failure:
                self.folder.keep_details(failure)
                return await self._losses.settle(failure, self.trackers.note)
        except RunError as failure:
            failure.memory = self._moves.who_holds_what(self.scheduler.workers_of(command))
            raise

    def _report(self, task: asyncio.Task[Any]) -> None:
        """Tell the main loop the event that ended a task, or the failure, which ends the run."""
        if task.cancelled():
            return
        outcome = task.exception() or task.result()
        if outcome is not None:
            self._events.put_nowait(outcome)

    # -- commands

    async def _run(self, run: Run) -> Event:
        task = self.plan.task(run.task)
        executor = self.plan.executors[task.executor]
        try:
            await (self._sample if task.generates else self._compute)(run, task, executor)
        except RunError:
            await runs_ahead_end(task.executor, self.plan, self._running)
            raise
        self._record(run.step).finish_run(run, task, executor)
        if task.selects:
            return self._rounds.end(run, self._ledger(run.step, task.rows), self._record(run.step))
        return RunDone(run)

    async def _compute(self, run: Run, task: PlannedTask, executor: Executor) -> None:
        """Share the rows out to all ranks at once.

        Until all have their shares nobody else comes in between: what is behind this finds what it promises.
        """
        ledger, record = self._ledger(run.step, task.rows), self._record(run.step)
        prompts, carried = self._prompts(run) if not task.inputs and task.rows is Rows.TRAIN else (None, ())
        work = share_out(
            run,
            task,
            executor,
            ledger,
            self.pipeline,
            position=self.position,
            committed=self.scheduler.committed,
            carried=carried,
            prompts=prompts,
            kl_weight=self._kl.weight(task.node, run.step),
        )
        if task.engine is None:
            member = self._idle_hosts.take(reads=prompts is not None)
            members = [member]
        else:
            members = self.fleet.members(task.executor)

        sent = [self.fleet.send(*each, record.went_through) for each in zip(members, work, strict=True)]
        if promised := self.plan.promises(task):
            for share, on_its_way in zip(work, sent, strict=True):
                ledger.promise(task.name, share.rows, on_its_way.columns)
        # Of all ranks or of none: where one is lost that can be started again, all of it is done again.
        answers = await together([self.fleet.answer(each, record.went_through) for each in sent])
        for member, blocks in zip(members, answers, strict=True):
            for block in blocks:
                self._take_note(run, task, block, member, record)
                if not promised:
                    self._put_down(run, task, block, ledger)
        if task.engine is None:
            self._idle_hosts.give_back(member)

    def _take_note(self, run: Run, task: PlannedTask, block: Block, member: Member, record: StepRecord) -> None:
        record.note(run, block, member.name)
        self._kl.note(task.node, run.step, block)
        if "next_position" in block.facts:
            record.position = self.position = block.facts["next_position"]

    def _put_down(self, run: Run, task: PlannedTask, block: Block, ledger: Ledger) -> None:
        """Say where the rows of a block are."""
        if task.selects:
            self._rounds.note(run, ledger, block)
        elif task.inputs:
            ledger.add(task.name, block)
        else:
            ledger.add_source(task.name, block)

    async def _sample(self, run: Run, task: PlannedTask, executor: Executor) -> None:
        """Deal the prompts of a rollout to its servers."""

        def shard_done(shard: int) -> None:
            self._events.put_nowait(ShardDone(run.step, task.name, shard, run.round))

        training = task.rows is Rows.TRAIN
        members = zip(self.fleet.members(task.executor), executor.places, strict=True)
        servers = [member for member, place in members if place.primary]
        ledger, record = self._ledger(run.step, task.rows), self._record(run.step)
        weights = self._syncs.coming(task.executor)
        if sampling := self._samplings.pop((run.step, task.name), None):
            sampling.again(run, servers, weights)
        else:
            sampling = Sampling(
                run,
                task,
                self.pipeline,
                self.fleet,
                servers,
                Books(ledger, record, shard_done, self.trackers.progress, self._sampled, self._appetites),
                committed=self.scheduler.committed,
                begun=self._carried.begun(run.step) if training else {},
                weights=weights,
            )
        self._sampling_on[task.executor] = sampling
        try:
            await sampling.finish()
        except WorkerLostError:
            self._samplings[run.step, task.name] = sampling
            raise
        finally:
            del self._sampling_on[task.executor]
        if training and self._is_partial:
            self._carried.leave(run.step, sampling.left())

    def _prompts(self, run: Run) -> tuple[int, tuple[int, ...]]:
        """How many prompts a round takes, and those that come first, for an earlier one has left them unfinished."""
        begun = self._rounds.prompts(run)
        carried = self._carried.take(run.step, begun)
        if self._is_partial:
            self._record(run.step).count("rollout/carried_prompts", len(carried))
        return begun, carried

    async def _sync(self, sync: Sync) -> Event:
        begun = time.time()

        async def ahead() -> None:
            """An update whose weights these are may still be under way."""
            nonlocal begun
            await runs_ahead_end(sync.source, self.plan, self._running)
            begun = time.time()

        try:
            figures = await self._syncs.carry_out(sync, ahead)
        except WorkerLostError as loss:
            if behind := self._sampling_on.get(sync.follower):
                behind.lose(loss)
            raise
        self._note_time(sync.step, "sync", sync.follower, begun)
        for name, figure in figures.items():
            self._record(sync.step).count(name, figure)
        return WeightsSynced(sync)

    async def _move(self, move: Sleep | Wake) -> Event:
        name = "sleep" if isinstance(move, Sleep) else "wake"
        with self._timed(move.step, name, move.executor):
            await self._moves.carry_out(move)
        if name == "sleep" and self.plan.executors[move.executor].on_gpus:
            self._record(move.step).freed(move.executor, self._moves.freed_gib(move.executor))
        return EngineReady(move.executor, move.residency)

    async def _restart(self, restart: Restart) -> Event:
        self._moves.forget(restart.executor)
        self._carried.forget_begun()
        with self._timed(restart.step, "restart", restart.executor):
            names = await self.fleet.restart(restart.executor)
        for name in names:
            self._sampled.pop(name, None)
        write_workers(self.fleet, self.plan, self.folder.path)
        self.trackers.note(f"{', '.join(names)} started again")
        return EngineReady(restart.executor, Residency.AWAKE)

    async def _save(self, save: Save) -> Event:
        with self._timed(save.step, "save", save.executor):
            await self._saving.save(save)
        return StateSaved(save)

    async def _commit(self, commit: Commit) -> Event:
        # Calls that came with it go out first: workers wait for those, and nobody for what is told of a step.
        await asyncio.sleep(0)
        record = self._record(commit.step)
        tokens = sum(ledger.total_tokens for (step, _), ledger in self._ledgers.items() if step == commit.step)
        slots = sum(group.ranks for group in self.pipeline.groups.values())
        record.count("run/restarts", self._restarts.count)
        metrics = record.metrics(tokens, policy_version=commit.step, slots=slots, last_commit=self._last_commit)
        self._last_commit = time.time()
        for what in self.overlong:
            self.overlong[what] += int(metrics.get(f"data/{what}_prompts", 0))
        self.trackers.log(commit.step, metrics)
        self._draw(commit.step, *record.activities)
        if commit.save:
            # Behind its metrics, whatever ends the run in between: those that no checkpoint holds are cut off again.
            assert record.position is not None, "a step that trained has had prompts"
            identity, carried = model_identity(self.pipeline), self._carried.after(commit.step)
            score = self._scoring.score(record)
            weights = self._kl.after(commit.step)
            await self._saving.finish(RunState(commit.step, record.position, identity, carried, score, weights))
        self._carried.commit(commit.step)
        self._kl.commit(commit.step)
        self._records.pop(commit.step)
        self._rounds.forget(commit.step)
        for rows in Rows:
            self._ledgers.pop((commit.step, rows), None)
        return StepCommitted(commit)

    def _draw(self, step: int, *activities: Activity) -> None:
        self.trackers.timeline.extend(
            complete_event(
                activity.name,
                activity.category,
                activity.start,
                activity.end,
                step=step,
                shard=activity.shard,
                group=activity.group,
                worker=activity.worker,
            )
            for activity in activities
        )

    # -- what belongs to a step

    @contextmanager
    def _timed(self, step: int, name: str, executor: str) -> Iterator[None]:
        """Put what happens within the context into the step's record."""
        start = time.time()
        yield
        self._note_time(step, name, executor, start)

    def _note_time(self, step: int, name: str, executor: str, start: float) -> None:
        group = self.plan.executors[executor].group or HOST
        self._record(step).add(Activity(name, name, start, time.time(), None, group, f"{executor}/0"))

    def _ledger(self, step: int, rows: Rows) -> Ledger:
        if (step, rows) not in self._ledgers:
            self._ledgers[step, rows] = Ledger(self.plan.group_size(rows), self.plan.shards)
        return self._ledgers[step, rows]

    def _record(self, step: int) -> StepRecord:
        return self._records.setdefault(step, StepRecord(step))
