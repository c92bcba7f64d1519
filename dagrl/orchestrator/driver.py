"""The main loop: executes the scheduler's commands on the workers and reports what has happened.

    scheduler --Run, Sync, Sleep, ...--> driver --work--> workers
    scheduler <--ShardDone, CommandDone, ...-- driver <--blocks (metadata and refs)-- workers

Each command is a coroutine that ends with an event, so commands run concurrently. The first failure ends the run,
unless workers of a generator or of servers are lost: those are restarted (`dagrl.orchestrator.groups.worker_failures`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, repeat, takewhile
from typing import Any

from dagrl.backends.base import RequestLimits
from dagrl.data.order.ids import source_of
from dagrl.graph.dag import EXPERIENCE_NODE, PROMPTS_NODE
from dagrl.ops.work import Carried
from dagrl.orchestrator.checkpoint_writer import CheckpointScorer, CheckpointWriter
from dagrl.orchestrator.exchange import Exchange
from dagrl.orchestrator.folder.checkpoint import RunState
from dagrl.orchestrator.folder.identity import model_identity
from dagrl.orchestrator.folder.run_folder import RunFolder
from dagrl.orchestrator.groups.offload import Offloader
from dagrl.orchestrator.groups.task_group import run_all
from dagrl.orchestrator.groups.weight_syncs import WeightSyncs
from dagrl.orchestrator.groups.worker_failures import RestartPolicy, WorkerFailures
from dagrl.orchestrator.groups.worker_group import CpuWorkerPool, WorkerGroups
from dagrl.orchestrator.records.recorder import Recorder, Recording
from dagrl.orchestrator.rollout_controller import RolloutController, RolloutReports
from dagrl.orchestrator.steps.account import StepAccount, rollout_facts
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.orchestrator.steps.dispatch import dispatch
from dagrl.orchestrator.steps.dynamic_sampling import DynamicSampling
from dagrl.orchestrator.steps.kl_control import KlControl
from dagrl.orchestrator.steps.partial_rollouts import PartialRolloutBuffer
from dagrl.orchestrator.steps.prompt_feed import PromptFeed
from dagrl.orchestrator.steps.record import StepRecord
from dagrl.orchestrator.steps.role_baselines import RoleBaselines
from dagrl.scheduler.commands import (
    Command,
    CommandDone,
    Commit,
    Event,
    LastStep,
    Restart,
    Run,
    Save,
    ShardDone,
    Sleep,
    StopRequested,
    Sync,
    Wake,
)
from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import HOST, Executor, Plan, PlannedTask, Rows, WorkerId
from dagrl.scheduler.scheduler import Scheduler
from dagrl.tracking import Trackers
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
        exchange: Exchange | None = None,
    ) -> None:
        """`exchange`: that of a part of the pipeline with the others."""
        pipeline, plan, start = prepared.loaded.pipeline, prepared.plan, folder.start
        self.pipeline = pipeline
        self.plan = plan
        self.scheduler = scheduler = Scheduler(plan, first_step=start.step + 1)
        self.groups = groups
        self.folder = folder
        self.trackers = trackers
        self._exchange = exchange
        self._gave_up: RunError | None = None
        """Why no further step can begin, if that is an error."""
        self._unsaved: RunState | None = None
        """The state after the last commit, if no checkpoint has it."""
        # Checkpoints of earlier versions do not have the tokens.
        carried = [Carried(*each) for each in zip(start.carried, repeat(None), chain(start.carried_tokens, repeat(())))]
        reads = any(task.op == PROMPTS_NODE and task.rows is Rows.TRAIN for task in plan.tasks)
        self._feed = PromptFeed(prepared, start.order, carried, start.step) if reads else None
        """None if the run reads no prompts for training."""
        self._partial_rollouts = self._feed.partial_rollouts if self._feed else PartialRolloutBuffer()
        if self._feed and self._feed.note:
            trackers.note(self._feed.note)
        self._rollout_facts = rollout_facts(pipeline, plan)
        """Facts about each rollout, for the account."""
        self._kl = KlControl(pipeline, start.kl_weights, start.step + 1)
        self._baselines = RoleBaselines(pipeline, start.baselines, start.step + 1)
        self._recorder = Recorder(prepared, groups, folder, trackers.note)
        self._keeps_partial = any(node.partial_rollout for node in pipeline.rollouts.values())
        self._sampled: dict[WorkerId, int] = {}
        """Worker -> tokens that its engine has sampled, from its last heartbeat."""
        self._request_limits: dict[tuple[str, int], RequestLimits] = {}
        """Engine and longest row -> how many requests its servers take."""
        self._overlong = {"dropped": 0, "cut": 0}
        """Training prompts longer than ``max_prompt_tokens``, by what was done with them."""
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._running: dict[asyncio.Task[Event | None], Command] = {}
        """The commands that are being executed, in the order in which they began."""
        self._restarts = restarts
        timeout_s = pipeline.run.node_timeout_s
        self._failures = WorkerFailures(groups, plan, restarts, timeout_s, self._running, scheduler.workers_of)
        self._interrupted: dict[tuple[int, str], RolloutController] = {}
        """Step and task -> a rollout that has lost servers and will continue."""
        self._recordings: dict[tuple[int, str], Recording | None] = {}
        """Step and task -> a rollout that is being recorded."""
        self._rollout_on: dict[str, RolloutController] = {}
        """Executor -> the rollout that it runs, or that is queued behind a weight sync."""
        self._batches: dict[tuple[int, Rows], BatchIndex] = {}
        self._last_commit: float | None = None
        self._records: dict[int, StepRecord] = {}
        self._cpu_workers = CpuWorkerPool(())
        self._offloader = Offloader(groups, plan, scheduler.residency)
        self._syncs = WeightSyncs(groups, pipeline)
        self._dynamic_sampling = DynamicSampling(pipeline, plan)
        self._scorer = CheckpointScorer(pipeline.run.keep_best, plan, trackers.note)
        self._writer = CheckpointWriter(
            groups,
            plan,
            folder.checkpoints,
            in_background=pipeline.run.async_save,
            timeout_s=timeout_s,
            draw=self._draw,
            report=self._report,
        )

    async def train(self) -> None:
        """Run until the scheduler has nothing left to do. Raises the first failure of a command."""
        self._cpu_workers = CpuWorkerPool(self.groups[HOST].handles)
        try:
            commands = self.scheduler.start()
            while not self.scheduler.finished:
                for command in commands:
                    self._begin(command)
                commands = self.scheduler.handle(*await self._next_events())
            await self._save_last()
            await self._writer.join()
            if self._gave_up is not None:
                raise self._gave_up
            if any(self._overlong.values()):
                counts = ", ".join(f"{count} {what}" for what, count in self._overlong.items())
                self.trackers.note(f"prompts that are too long, or have too long responses: {counts}")
        except RunError:
            await self._recorder.drain()
            raise
        finally:
            for task in self._running:
                task.cancel()
            self._writer.cancel()
            self._recorder.close()
            for step, record in self._records.items():
                if step > self.scheduler.committed:
                    with suppress(OSError):  # the disk may be full
                        batch = self._batch(step, Rows.TRAIN)
                        self.trackers.add_lost(record.account.metrics((), self._source_of(batch)))

    def request_stop(self) -> None:
        """Stop at the next step boundary, with a checkpoint."""
        if self._exchange is not None:
            self._exchange.stop_requested = True
        self._events.put_nowait(StopRequested())

    async def _next_events(self) -> list[Event]:
        """All events since the last call, at least one. Two events together may allow one call instead of two."""
        # No timeout: every command has one.
        assert self._running or not self._events.empty(), "no command is running, and the run is not over"
        outcomes = [await self._events.get()]
        while not self._events.empty():
            outcomes.append(self._events.get_nowait())
        events: list[Event] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            events.append(outcome)
        return events

    def _begin(self, command: Command) -> None:
        task = asyncio.get_running_loop().create_task(self._execute(command))
        self._running[task] = command
        task.add_done_callback(self._running.pop)
        task.add_done_callback(self._report)

    async def _execute(self, command: Command) -> Event | None:
        actions: dict[type, Callable[[Any], Coroutine[Any, Any, Event | None]]] = {
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
                return await actions[type(command)](command) or CommandDone(command)
            except WorkerLostError as failure:
                self.folder.keep_details(failure)
                return await self._failures.handle(failure, self.trackers.note)
        except RunError as failure:
            failure.memory = self._offloader.describe(self.scheduler.workers_of(command))
            raise

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
        try:
            is_source = not task.inputs and task.rows is Rows.TRAIN
            if is_source and self._exchange is not None and run.round == 0:
                began = time.monotonic()
                try:
                    begins = await self._exchange.begin(run.step)
                except RunError as error:
                    # A wait that was too long: what the steps before it have trained is saved first.
                    self._gave_up, begins = error, False
                if not begins:
                    # Nothing of the step has begun.
                    self._events.put_nowait(LastStep(run.step - 1))
                    return None
                self._record(run.step).add_number("experience/wait_s", time.monotonic() - began)
            reads = is_source and task.op == PROMPTS_NODE
            execute = self._rollout if task.generates else self._read_prompts if reads else self._compute
            await execute(run, task, executor)
        except RunError:
            await wait_for_earlier_runs(task.executor, self.plan, self._running)
            raise
        self._record(run.step).finish_run(run, task, executor)
        if task.selects:
            return self._dynamic_sampling.end_round(run, self._batch(run.step, task.rows), self._record(run.step))
        return None

    async def _compute(self, run: Run, task: PlannedTask, executor: Executor) -> None:
        """Dispatch the rows to all ranks.

        There is no await before all ranks have their work, so that a task queued behind this one finds its outputs.
        """
        batch, record = self._batch(run.step, task.rows), self._record(run.step)
        kl_weight, baselines = self._kl.weight(task.node, run.step), self._baselines.before(task.node, run.step)
        exchanges = self._exchange is not None and task.op == EXPERIENCE_NODE
        work = dispatch(
            run,
            task,
            executor,
            batch,
            self.pipeline,
            committed=self.scheduler.committed,
            kl_weight=kl_weight,
            baselines=baselines,
            experience=self._exchange.file(run.step) if self._exchange is not None and exchanges else None,
            publish=self._exchange.weights_to_write(run.step, task) if self._exchange is not None else None,
        )
        recording = self._recorder.begin(run, task, executor, batch, kl_weight, baselines)
        on_cpu = task.engine is None
        handles = [self._cpu_workers.take(reads=False)] if on_cpu else self.groups[task.executor].handles
        pending = [handle.submit_task(each, record.count_bytes) for handle, each in zip(handles, work, strict=True)]
        self._recorder.follow(recording, executor)
        if predictable := self.plan.outputs_are_predictable(task):
            for share, each in zip(work, pending, strict=True):
                batch.promise(task.name, share.rows, each.columns)
        # All ranks or none: if a rank is lost and can be restarted, the whole task runs again.
        results = await run_all([each.result(record.count_bytes) for each in pending])
        for each, blocks in zip(pending, results, strict=True):
            for block in blocks:
                record.add_block(run, block, each.worker.id)
                record.account.add_update(task, block)
                self._kl.add(task.node, run.step, block)
                self._baselines.add(task, run.step, block)
                if self._feed and task.rows is Rows.TRAIN:
                    self._feed.learn(run, block, batch)
                if not predictable:
                    self._publish(run, task, block, batch)
        if on_cpu:
            self._cpu_workers.give_back(handles[0])
        ended = [(each.worker.id, block) for each, blocks in zip(pending, results, strict=True) for block in blocks]
        self._recorder.end(recording, ended)

    async def _read_prompts(self, run: Run, task: PlannedTask, executor: Executor) -> None:
        """Read the prompts of a round; others take the places of those that are too long."""
        assert self._feed is not None, "a run that only validates reads no prompts for training"
        feed, batch, record = self._feed, self._batch(run.step, task.rows), self._record(run.step)
        ids = await feed.take(run, self._dynamic_sampling.prompts(run), record)
        handle = self._cpu_workers.take(reads=True)
        while True:
            (work,) = dispatch(
                run,
                task,
                executor,
                batch,
                self.pipeline,
                committed=self.scheduler.committed,
                prompts=ids,
                ahead=feed.ahead(run),
            )
            blocks = await handle.submit_task(work, record.count_bytes).result(record.count_bytes)
            for block in blocks:
                record.add_block(run, block, handle.id)
            dropped = [prompt for block in blocks for prompt in block.dropped]
            if not dropped:
                break
            ids = feed.replace(run, ids, dropped)
        self._cpu_workers.give_back(handle)
        for block in blocks:
            batch.add_source(task.name, block)
        if feed.end_round(run, ids):
            # Before the run is reported as done, so that no later step reads prompts.
            self._events.put_nowait(LastStep(run.step))

    def _publish(self, run: Run, task: PlannedTask, block: Block, batch: BatchIndex) -> None:
        """Record where the rows of a block are stored."""
        if task.selects:
            self._dynamic_sampling.add(run, batch, block)
        elif task.replays:
            batch.extend(task.name, block)
        elif task.inputs:
            batch.add(task.name, block)
        else:
            batch.add_source(task.name, block)

    async def _rollout(self, run: Run, task: PlannedTask, executor: Executor) -> None:
        def shard_done(shard: int) -> None:
            self._events.put_nowait(ShardDone(run.step, task.name, shard, run.round))

        training = task.rows is Rows.TRAIN
        ranks = zip(self.groups[task.executor].handles, executor.places, strict=True)
        servers = [handle for handle, place in ranks if place.primary]
        batch, record = self._batch(run.step, task.rows), self._record(run.step)
        if self._exchange is not None:
            await self._exchange.load_weights(task.executor, self.groups)
        weights = self._syncs.pending(task.executor)
        if rollout := self._interrupted.pop((run.step, task.name), None):
            rollout.retry(run, servers, weights)
        else:
            # Before over-sampling leaves open which groups are the batch.
            self._recordings[run.step, task.name] = self._recorder.begin(run, task, executor, batch, None)
            rollout = RolloutController(
                run,
                task,
                self.pipeline,
                servers,
                RolloutReports(batch, record, shard_done, self.trackers.progress, self._sampled, self._request_limits),
                committed=self.scheduler.committed,
                carried=self._partial_rollouts.taken(run.step, run.round) if training else (),
                weights=weights,
            )
        self._rollout_on[task.executor] = rollout
        try:
            await rollout.run()
        except WorkerLostError:
            self._interrupted[run.step, task.name] = rollout
            raise
        finally:
            del self._rollout_on[task.executor]
        self._recorder.end(self._recordings.pop((run.step, task.name)), rollout.blocks, rollout.chunks)
        if training and self._keeps_partial:
            self._partial_rollouts.add(run.step, rollout.unfinished())

    async def _sync(self, sync: Sync) -> None:
        begin = time.time()

        async def update() -> None:
            """Wait for the update that makes these weights."""
            nonlocal begin
            await wait_for_earlier_runs(sync.source, self.plan, self._running)
            begin = time.time()

        try:
            metrics = await self._syncs.run(sync, update)
        except WorkerLostError as loss:
            if rollout := self._rollout_on.get(sync.follower):
                rollout.lose(loss)
            raise
        self._add_activity(sync.step, "sync", sync.follower, begin)
        for name, value in metrics.items():
            self._record(sync.step).add_number(name, value)

    async def _move(self, move: Sleep | Wake) -> None:
        name = "sleep" if isinstance(move, Sleep) else "wake"
        with self._timed(move.step, name, move.executor):
            await self._offloader.move(move)
        if name == "sleep" and self.plan.executors[move.executor].on_gpus:
            self._record(move.step).add_freed(move.executor, self._offloader.freed_gib(move.executor))

    async def _restart(self, restart: Restart) -> None:
        self._offloader.forget(restart.executor)
        if self._exchange is not None:
            self._exchange.forget(restart.executor)
        self._partial_rollouts.drop_tokens()
        with self._timed(restart.step, "restart", restart.executor):
            restarted = await self._failures.restart(restart.executor)
        for worker in restarted:
            self._sampled.pop(worker, None)
        self.groups.write_info(self.folder.path)
        self.trackers.note(f"{', '.join(map(str, restarted))} restarted")

    async def _save(self, save: Save) -> None:
        with self._timed(save.step, "save", save.executor):
            await self._writer.save(save)

    async def _commit(self, commit: Commit) -> None:
        # Calls of the same batch of commands go out first: workers wait for them.
        await asyncio.sleep(0)
        record = self._record(commit.step)
        tokens = sum(batch.total_tokens for (step, _), batch in self._batches.items() if step == commit.step)
        slots = sum(group.ranks for group in self.pipeline.groups.values())
        record.add_number("run/restarts", self._restarts.count)
        version = commit.step if self._exchange is None else self._exchange.policy_version(commit.step)
        metrics = record.metrics(tokens, policy_version=version, slots=slots, last_commit=self._last_commit)
        if self._feed:
            metrics |= self._feed.metrics(commit.step)
            self._feed.learn_metrics(commit.step, metrics, validated=self.plan.validates(commit.step))
        if batch := self._batches.get((commit.step, Rows.TRAIN)):
            metrics |= record.account.metrics(batch.groups_in(batch.all_rows), self._source_of(batch))
        self._last_commit = time.time()
        for what in self._overlong:
            self._overlong[what] += int(metrics.get(f"data/{what}_prompts", 0))
        if self.plan.only_validates:
            # The rest of the step's line is that of its training.
            metrics = {name: value for name, value in metrics.items() if name.startswith("val/")}
        self.trackers.log(commit.step, metrics)
        self._draw(record.activities)
        if commit.save or (self._exchange is not None and commit.step):
            # After its metrics: a resume drops the metrics of steps without a checkpoint, but cannot add any.
            carried = self._partial_rollouts.after(commit.step)
            self._unsaved = RunState(
                commit.step,
                model_identity(self.pipeline),
                self._feed.after(commit.step) if self._feed else {},
                tuple(each.prompt for each in carried),
                self._scorer.score(record),
                self._kl.after(commit.step),
                tuple(each.sampled for each in carried),
                self._exchange.used(commit.step) if self._exchange is not None else {},
                self._baselines.after(commit.step),
            )
        if commit.save:
            assert self._unsaved is not None
            await self._writer.finish(self._unsaved)
            self._unsaved = None
        if self._exchange is not None and commit.step:
            await self._exchange.commit(commit.step)
        await self._recorder.commit(commit.step)
        if self._feed:
            self._feed.commit(commit.step)
        self._kl.commit(commit.step)
        self._baselines.commit(commit.step)
        self._records.pop(commit.step)
        self._dynamic_sampling.commit(commit.step)
        for rows in Rows:
            self._batches.pop((commit.step, rows), None)

    async def _save_last(self) -> None:
        """Save the last step, if it was committed before it was known to be the last."""
        if self._unsaved is not None:
            for executor in self.plan.executors.values():
                if executor.trained:
                    await self._writer.save(Save(self._unsaved.step, executor.name))
            await self._writer.finish(self._unsaved)

    def _draw(self, activities: Iterable[Activity]) -> None:
        if not self.plan.only_validates:
            self.trackers.timeline.extend(activities)

    # -- state of a step

    @contextmanager
    def _timed(self, step: int, name: str, executor: str) -> Iterator[None]:
        """Add the time of the context to the step's record."""
        start = time.time()
        yield
        self._add_activity(step, name, executor, start)

    def _add_activity(self, step: int, name: str, executor: str, start: float) -> None:
        group = self.plan.executors[executor].group or HOST
        worker = WorkerId(executor, 0)
        self._record(step).add(Activity(name, name, start, time.time(), step, None, group, worker))

    def _source_of(self, batch: BatchIndex) -> Callable[[int], str] | None:
        """From a group of the batch to the name of its source; None if there is a single one."""
        names = [*self.pipeline.data.train_prefixes]
        return (lambda group: names[source_of(batch.prompt(group))]) if names else None

    def _batch(self, step: int, rows: Rows) -> BatchIndex:
        if (step, rows) not in self._batches:
            self._batches[step, rows] = BatchIndex(self.plan.group_size(rows), self.plan.shards)
        return self._batches[step, rows]

    def _record(self, step: int) -> StepRecord:
        if step not in self._records:
            account = StepAccount(self.plan.samples_per_prompt, self._rollout_facts)
            self._records[step] = StepRecord(step, account)
        return self._records[step]


async def wait_for_earlier_runs(executor: str, plan: Plan, running: dict[asyncio.Task[Event | None], Command]) -> None:
    """Wait for the runs on an executor that began before the current task. Raises the failure of the first one.

    If a run fails, so do those that are queued behind it, and it has the cause.
    """
    if executor == HOST:  # CPU workers run tasks concurrently
        return
    current = asyncio.current_task()
    for task, command in takewhile(lambda each: each[0] is not current, list(running.items())):
        if isinstance(command, Run) and plan.task(command.task).executor == executor:
            await asyncio.wait([task])
            if not task.cancelled() and (failure := task.exception()):
                raise failure
