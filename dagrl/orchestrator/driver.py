"""The main loop: executes the scheduler's commands on the workers and reports the events that follow.

    scheduler --Run, Sync, Sleep, ...--> driver --work--> workers
    scheduler <--ShardDone, CommandDone, ...-- driver <--blocks (metadata and refs)-- workers

A step is a sequence of commands, each a method of `Driver`, here in their usual order:

    Run prompts             _read_prompts   a CPU worker reads the prompts that `PromptFeed` names
    Sync generator          _sync           `WeightSyncs.run`: the trainer's ranks send weights to the generator's
    Run rollout             _rollout        `Rollouts.run`: servers sample; each complete shard is a `ShardDone`
    Run reward, ref, ...    _compute        `dispatch` splits rows over ranks, which run the op and return blocks
    Run update              _compute        the same
    Save actor              _save           `CheckpointWriter.save`
    Commit                  _commit         metrics are logged, the checkpoint is moved into place, the step is dropped

Each command is a coroutine that ends with an event, so commands run concurrently. The first failure ends the run,
unless workers of a generator or of servers are lost: those are restarted (`dagrl.orchestrator.groups.worker_failures`).
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from dagrl.graph.dag import EXPERIENCE_NODE, PROMPTS_NODE
from dagrl.orchestrator.alarms import AlarmWatch
from dagrl.orchestrator.checkpoint_writer import CheckpointScorer, CheckpointWriter
from dagrl.orchestrator.exchange import Exchange
from dagrl.orchestrator.folder.checkpoint import RunState
from dagrl.orchestrator.folder.run_folder import RunFolder
from dagrl.orchestrator.groups.elastic import ElasticGroups
from dagrl.orchestrator.groups.offload import Offloader
from dagrl.orchestrator.groups.task_group import run_all
from dagrl.orchestrator.groups.weight_syncs import WeightSyncs
from dagrl.orchestrator.groups.worker_failures import RestartPolicy, WorkerFailures, wait_for_earlier_runs
from dagrl.orchestrator.groups.worker_group import CpuWorkerPool, WorkerGroups
from dagrl.orchestrator.records.recorder import Recorder
from dagrl.orchestrator.rollout_controller import Rollouts
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.orchestrator.steps.carried_state import CarriedState
from dagrl.orchestrator.steps.dispatch import OpInputs, dispatch
from dagrl.orchestrator.steps.dynamic_sampling import DynamicSampling
from dagrl.orchestrator.steps.record import OpenSteps
from dagrl.scheduler.commands import (
    Command,
    CommandDone,
    Commit,
    Event,
    LastStep,
    Restart,
    Run,
    Save,
    Sleep,
    StopRequested,
    Sync,
    Wake,
)
from dagrl.scheduler.history import SchedulerError
from dagrl.scheduler.plan import HOST, Executor, PlannedTask, Rows
from dagrl.scheduler.scheduler import Scheduler
from dagrl.tracking import Trackers
from dagrl.tracking.alarms import Alarm
from dagrl.validation.prepare import PreparedPipeline
from dagrl.workers.errors import RunError, WorkerLostError
from dagrl.workers.messages import Block


class Driver:
    """One run, from its first step to its last."""

    def __init__(
        self,
        prepared: PreparedPipeline,
        groups: WorkerGroups,
        folder: RunFolder,
        trackers: Trackers,
        restarts: RestartPolicy,
        exchange: Exchange,
    ) -> None:
        self.pipeline, self.plan = pipeline, plan = prepared.loaded.pipeline, prepared.plan
        self.groups, self.folder, self.trackers = groups, folder, trackers
        self.scheduler = Scheduler(plan, first_step=folder.start.step + 1)
        self._exchange, self._restarts = exchange, restarts
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._running: dict[asyncio.Task[Event | None], Command] = {}
        """The commands that are being executed, in the order in which they began."""
        self._gave_up: RunError | None = None
        """The error that prevents further steps, if any."""
        self._unsaved: RunState | None = None
        """The state after the last commit, if no checkpoint has it."""
        self._last_commit: float | None = None
        self._cpu_workers = CpuWorkerPool(())
        self._steps = OpenSteps(pipeline, plan)
        self._carried = CarriedState(prepared, folder.start, trackers.note)
        self._dynamic_sampling = DynamicSampling(pipeline, plan)
        self._recorder = Recorder(prepared, groups, folder, trackers.note)
        self._syncs = WeightSyncs(groups, pipeline)
        report = self._events.put_nowait
        self._rollouts = Rollouts(pipeline, groups, self._syncs, self._recorder, trackers.progress, report)
        self._offloader = Offloader(groups, plan, self.scheduler.residency)
        timeout_s = pipeline.run.node_timeout_s
        self._elastic = ElasticGroups(groups, plan, pipeline, trackers.note)
        self._failures = WorkerFailures(
            groups, plan, restarts, timeout_s, self._running, self.scheduler.workers_of, self._elastic
        )
        self.alarms = AlarmWatch(prepared, folder, trackers.warn)
        self._scorer = CheckpointScorer(pipeline.run.keep_best, plan, trackers.note)
        self._writer = CheckpointWriter(
            groups,
            plan,
            folder.checkpoints,
            in_background=pipeline.run.async_save,
            timeout_s=timeout_s,
            draw=trackers.timeline.extend,
            report=self._report,
        )

    async def train(self) -> None:
        """Run until the scheduler has nothing left to do. Raises the first failure of a command."""
        self._cpu_workers = CpuWorkerPool(self.groups[HOST].handles)
        refilling = asyncio.get_running_loop().create_task(self._elastic.refill())
        refilling.add_done_callback(self._report)
        try:
            commands = self.scheduler.start()
            while not self.scheduler.finished:
                for command in commands:
                    self._begin(command)
                events = await self._next_events()
                commands = self.scheduler.handle(*events)
                if any(isinstance(event, CommandDone) and isinstance(event.command, Commit) for event in events):
                    self.scheduler.validate_state()
            if self._unsaved is not None:
                # Its step was committed before it was known to be the last.
                await self._writer.save_all(self._unsaved)
            await self._writer.join()
            await self.alarms.join()
            if self._gave_up is not None:
                raise self._gave_up
        except RunError:
            with suppress(SchedulerError):  # the first failure is the cause
                await self._finish_checkpoints()
            await self._recorder.drain()
            raise
        except SchedulerError as error:
            hint = "this is a bug in dagrl: report it with the details, and run it again from its last checkpoint"
            raise RunError(str(error), hint=hint, details=error.story) from error
        finally:
            refilling.cancel()
            for task in self._running:
                task.cancel()
            self._writer.cancel()
            self._recorder.close()
            for lost in self._steps.lost(self.scheduler.committed):
                with suppress(OSError):  # the disk may be full
                    self.trackers.add_lost(lost)

    async def _finish_checkpoints(self) -> None:
        """After a failure, finish the checkpoints of earlier steps that are being written."""
        noted = False
        while (saving := self._being_saved()) or not self._events.empty():
            if saving and not noted:
                self.trackers.note(f"the run has failed, and ends when step {saving[0].step} is saved")
                noted = True
            outcome = await self._events.get()
            # Other failures follow from the first one. A save that fails is no longer among those that are running.
            for command in [] if isinstance(outcome, BaseException) else self.scheduler.handle(outcome):
                if isinstance(command, Save | Commit):
                    self._begin(command)
        with suppress(RunError, OSError):
            await self._writer.join()

    def _being_saved(self) -> list[Save | Commit]:
        return [command for command in self._running.values() if isinstance(command, Save | Commit)]

    def request_stop(self) -> None:
        """Stop at the next step boundary, with a checkpoint."""
        self._exchange.stop_requested = True
        self._events.put_nowait(StopRequested())

    async def _next_events(self) -> list[Event]:
        """All events since the last call, at least one. Two events together may allow one call instead of two."""
        # No timeout: every command has one.
        outcomes = [await self._events.get()]
        while not self._events.empty():
            outcomes.append(self._events.get_nowait())
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        events = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        if failures:
            for event in events:
                self._events.put_nowait(event)
            raise failures[0]
        self._failures.report(events)
        return events

    def _begin(self, command: Command) -> None:
        if self._failures.awaits_report(command):
            return  # `WorkerLost` ends it
        task = asyncio.get_running_loop().create_task(self._execute(command))
        self._running[task] = command
        task.add_done_callback(self._running.pop)
        task.add_done_callback(self._report)

    async def _execute(self, command: Command) -> Event | None:
        try:
            try:
                return await self._event_of(command) or CommandDone(command)
            except WorkerLostError as failure:
                self.folder.keep_details(failure)
                return await self._failures.handle(failure, self.trackers.note)
        except RunError as failure:
            failure.memory = self._offloader.describe(self.scheduler.workers_of(command))
            raise

    async def _event_of(self, command: Command) -> Event | None:
        """Execute a command; returns the event that ends it, None for `CommandDone`."""
        match command:
            case Run():
                return await self._run(command)
            case Sync():
                await self._sync(command)
            case Sleep() | Wake():
                await self._move(command)
            case Restart():
                await self._restart(command)
            case Save():
                await self._save(command)
            case Commit():
                await self._commit(command)
        return None

    def _report(self, task: asyncio.Task[Event | None]) -> None:
        """Pass the event that ended a task, or its failure, to the main loop."""
        if task.cancelled():
            return
        outcome = task.exception() or task.result()
        if outcome is not None:
            self._events.put_nowait(outcome)

    # -- commands

    async def _run(self, run: Run) -> Event | None:
        task = self.plan.task(run.task)
        executor = self.plan.executors[task.executor]
        is_source = not task.inputs and task.rows is Rows.TRAIN
        try:
            if is_source and run.round == 0 and not await self._may_begin(run.step):
                return None
            batch, record = self._steps.batch(run.step, task.rows), self._steps.record(run.step)
            if task.generates:
                await self._rollout(run, task, executor, batch)
            elif is_source and task.op == PROMPTS_NODE:
                await self._read_prompts(run, task, executor, batch)
            else:
                await self._compute(run, task, executor, batch)
        except RunError:
            await wait_for_earlier_runs(task.executor, self.plan, self._running)
            raise
        record.finish_run(run, task, executor)
        return self._dynamic_sampling.end_round(run, batch, record) if task.selects else None

    async def _may_begin(self, step: int) -> bool:
        """Wait until the other parts of the pipeline let a step begin. The run ends if they never will."""
        began = time.monotonic()
        try:
            begins = await self._exchange.begin(step)
        except RunError as error:
            # The wait timed out: the results of earlier steps are saved first.
            self._gave_up, begins = error, False
        if not begins:
            self._events.put_nowait(LastStep(step - 1))
        elif self._exchange.is_part:
            self._steps.record(step).add_number("experience/wait_s", time.monotonic() - began)
        return begins

    async def _read_prompts(self, run: Run, task: PlannedTask, executor: Executor, batch: BatchIndex) -> None:
        """Read the prompts of a round; further ones replace prompts that are too long."""
        feed, record = self._carried.feed, self._steps.record(run.step)
        assert feed is not None, "a run that only validates reads no prompts for training"
        ids = await feed.take(run, self._dynamic_sampling.prompts(run), record)
        handle = self._cpu_workers.take(reads=True)
        while True:
            inputs = OpInputs(prompts=ids, ahead=feed.ahead(run))
            committed = self.scheduler.committed
            (work,) = dispatch(run, task, executor, batch, self.pipeline, committed=committed, inputs=inputs)
            blocks = await handle.submit_task(work, record.count_bytes).result(record.count_bytes)
            for block in blocks:
                record.add_block(run, block, handle.id)
            dropped = [prompt for block in blocks for prompt in block.dropped]
            if not dropped:
                break
            ids = await feed.replace(run, ids, dropped)
        self._cpu_workers.give_back(handle)
        for block in blocks:
            batch.add_source(task.name, block)
        if feed.end_round(run, ids):
            # Before the run is reported as done, so that no later step reads prompts.
            self._events.put_nowait(LastStep(run.step))

    async def _sync(self, sync: Sync) -> None:
        begin = time.time()
        if joined := self._elastic.admit(sync.follower):
            self._rollouts.forget(joined)
            self.groups.write_info(self.folder.path)

        async def update() -> None:
            """Wait for the update that makes these weights."""
            nonlocal begin
            await wait_for_earlier_runs(sync.source, self.plan, self._running)
            begin = time.time()

        try:
            metrics = await self._syncs.run(sync, update)
        except WorkerLostError as loss:
            self._rollouts.lose(sync.follower, loss)
            raise
        record = self._steps.record(sync.step)
        record.add_move("sync", self.plan.executors[sync.follower], begin)
        for name, value in metrics.items():
            record.add_number(name, value)

    async def _rollout(self, run: Run, task: PlannedTask, executor: Executor, batch: BatchIndex) -> None:
        await self._exchange.load_weights(task.executor, self.groups)
        training, unfinished = task.rows is Rows.TRAIN, self._carried.partial_rollouts
        record, committed = self._steps.record(run.step), self.scheduler.committed
        carried = unfinished.taken(run.step, run.round) if training else ()
        rollout = await self._rollouts.run(run, task, executor, batch, record, committed, carried)
        if training and self._carried.keeps_partial:
            unfinished.add(run.step, rollout.unfinished())

    async def _compute(self, run: Run, task: PlannedTask, executor: Executor, batch: BatchIndex) -> None:
        """Dispatch the rows to all ranks.

        There is no await before all ranks have their work, so that a task queued behind this one finds its outputs.
        """
        record = self._steps.record(run.step)
        inputs = OpInputs(
            kl_weight=self._carried.kl.weight(task.node, run.step),
            baselines=self._carried.baselines.before(task.node, run.step),
            experience=self._exchange.file(run.step) if task.op == EXPERIENCE_NODE else None,
            publish=self._exchange.weights_to_write(run.step, task),
        )
        committed = self.scheduler.committed
        work = dispatch(run, task, executor, batch, self.pipeline, committed=committed, inputs=inputs)
        recording = self._recorder.begin(run, task, executor, batch, inputs)
        on_cpu = task.engine is None
        handles = [self._cpu_workers.take(reads=False)] if on_cpu else self.groups[task.executor].handles
        pending = [handle.submit_task(share, record.count_bytes) for handle, share in zip(handles, work, strict=True)]
        self._recorder.follow(recording, executor)
        if predictable := self.plan.outputs_are_predictable(task):
            for share, call in zip(work, pending, strict=True):
                batch.promise(task.name, share.rows, call.columns)
        # All ranks or none: if a rank is lost and can be restarted, the whole task runs again.
        results = await run_all([call.result(record.count_bytes) for call in pending])
        ended = [(call.worker.id, block) for call, blocks in zip(pending, results, strict=True) for block in blocks]
        for worker, block in ended:
            record.add_block(run, block, worker)
            record.account.add_update(task, block)
            self._carried.add(run, task, block, batch)
            if not predictable:
                self._publish(run, task, block, batch)
        if on_cpu:
            self._cpu_workers.give_back(handles[0])
        self._recorder.end(recording, ended)

    def _publish(self, run: Run, task: PlannedTask, block: Block, batch: BatchIndex) -> None:
        if task.selects:
            self._dynamic_sampling.add(run, batch, block)
        elif task.replays:
            batch.extend(task.name, block)
        elif task.inputs:
            batch.add(task.name, block)
        else:
            batch.add_source(task.name, block)

    async def _move(self, move: Sleep | Wake) -> None:
        begin, sleeps, executor = time.time(), isinstance(move, Sleep), self.plan.executors[move.executor]
        await self._offloader.move(move)
        record = self._steps.record(move.step)
        record.add_move("sleep" if sleeps else "wake", executor, begin)
        if sleeps and executor.on_gpus:
            record.add_freed(move.executor, self._offloader.freed_gib(move.executor))

    async def _restart(self, restart: Restart) -> None:
        begin = time.time()
        self._offloader.forget(restart.executor)
        self._exchange.forget(restart.executor)
        self._carried.partial_rollouts.drop_tokens()
        restarted = await self._failures.restart(restart.executor)
        self._steps.record(restart.step).add_move("restart", self.plan.executors[restart.executor], begin)
        self._rollouts.forget(restarted)
        self.groups.write_info(self.folder.path)
        if restarted:
            self.trackers.note(f"{', '.join(map(str, restarted))} restarted")

    async def _save(self, save: Save) -> None:
        begin = time.time()
        await self._writer.save(save)
        self._steps.record(save.step).add_move("save", self.plan.executors[save.executor], begin)

    async def _commit(self, commit: Commit) -> None:
        # Calls of the same batch of commands are sent first, because workers wait for them.
        await asyncio.sleep(0)
        step, record = commit.step, self._steps.record(commit.step)
        metrics = self._metrics(step)
        self._last_commit = time.time()
        if self.plan.only_validates:
            # The rest of the step's line belongs to its training.
            metrics = {name: value for name, value in metrics.items() if name.startswith("val/")}
        self.trackers.log(step, metrics)
        alarms: list[Alarm] = []
        if not self.plan.only_validates:
            self.trackers.timeline.extend(record.activities)
            alarms = self.alarms.look(step, metrics)
            if any(alarm.stops for alarm in alarms):
                self.request_stop()
        if commit.save or (self._exchange.is_part and step):
            # After its metrics: a resume drops the metrics of steps without a checkpoint, but cannot add any.
            self._unsaved = self._carried.after(step, self._scorer.score(record), self._exchange.used(step))
        if commit.save:
            assert self._unsaved is not None
            await self._writer.finish(self._unsaved)
            self._unsaved = None
        if step:
            await self._exchange.commit(step)
        await self._recorder.commit(step, alarms)
        self._carried.commit(step)
        self._dynamic_sampling.commit(step)
        self._steps.drop(step)

    def _metrics(self, step: int) -> dict[str, float]:
        """The metrics of a step at its commit. Raises RunError if the order of prompts needs a missing one."""
        record = self._steps.record(step)
        record.add_number("run/restarts", self._restarts.count)
        if self._elastic.executors:
            record.add_number("run/missing_ranks", self._elastic.missing)
        slots = sum(group.ranks for group in self.pipeline.groups.values()) - self._elastic.missing
        version = self._exchange.policy_version(step)
        metrics = record.metrics(self._steps.tokens(step), version, slots, self._last_commit)
        metrics |= self._carried.end_step(step, metrics, validated=self.plan.validates(step))
        return metrics | self._steps.account(step)
