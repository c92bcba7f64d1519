"""Controls rollouts: sends chunks of prompts to the servers, collects responses, and stops when there are enough.

load balancer --groups--> servers --blocks--> batch index --> complete shards
                             ^                     |
                             +------- abort -------+  if more prompts were started than the step needs

If a server is lost, the others are stopped too, and a further attempt samples the missing groups. Conversations that
workers have paused continue.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dagrl.backends.base import RequestLimits
from dagrl.config.schema import Pipeline, RolloutNode
from dagrl.config.schema.rounds import groups_returned, over_sampled
from dagrl.ops.work import Begun, Carried, PartialRollout, PausedGroup, PendingWeights, RolloutId
from dagrl.orchestrator.groups.load_balancer import LoadBalancer, agent_limits, chunk_limits, gather_seconds
from dagrl.orchestrator.groups.task_group import TaskGroup
from dagrl.orchestrator.groups.weight_syncs import WeightSyncs
from dagrl.orchestrator.groups.worker_group import WorkerGroups
from dagrl.orchestrator.groups.worker_handle import WorkerHandle
from dagrl.orchestrator.records.recorder import Recorder, Recording
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.orchestrator.steps.dispatch import dispatch_chunk
from dagrl.orchestrator.steps.record import StepRecord
from dagrl.scheduler.commands import Run, ShardDone
from dagrl.scheduler.plan import Executor, PlannedTask, Rows, WorkerId
from dagrl.tracking.base import Progress
from dagrl.workers.errors import RunError, WorkerLostError
from dagrl.workers.messages import Block, Heartbeat
from dagrl.workers.worker import Worker


@dataclass(frozen=True, slots=True)
class RolloutReports:
    """Receivers of a rollout's progress."""

    batch: BatchIndex
    record: StepRecord
    shard_done: Callable[[int], None]
    """Called when a shard is complete, except for the last ones, which the end of the rollout reports."""
    progress: Callable[[Progress], None]
    sampled: dict[WorkerId, int]
    """Worker -> tokens that its engine had sampled at its last heartbeat. Kept from one rollout to the next."""
    request_limits: dict[tuple[str, int], RequestLimits] = field(default_factory=dict)
    """Engine and longest row -> requests that its servers accept. Kept from one rollout to the next."""


class RolloutController:
    """A rollout that is running."""

    def __init__(
        self,
        run: Run,
        task: PlannedTask,
        pipeline: Pipeline,
        servers: Sequence[WorkerHandle],
        reports: RolloutReports,
        *,
        committed: int,
        carried: Sequence[Carried],
        weights: PendingWeights | None = None,
    ) -> None:
        """`carried`: prompts of the run left by earlier steps. `weights`: the servers wait for these first."""
        node = pipeline.nodes[task.node]
        assert isinstance(node, RolloutNode)
        self._run, self._task, self._node, self._pipeline = run, task, node, pipeline
        self._servers, self._reports, self._committed = servers, reports, committed
        batch = reports.batch
        self._groups: list[int] = np.unique(batch.groups(batch.rows(run.shards))).tolist()
        self._training = task.rows is Rows.TRAIN
        over_samples = self._training and node.over_sampling_batch_size is not None
        self._needed = len(self._groups) - (over_sampled(pipeline) if over_samples else 0)
        batch.expect(task.name, self._needed if over_samples else None)
        self._missing = dict.fromkeys(self._groups)
        """Groups that are not part of the batch yet, in order."""
        self._begun: dict[int, Begun] = {}
        """Group -> the responses begun in it."""
        self.chunks: list[tuple[int, Sequence[int]]] = []
        """Server and groups of each call, in the order in which they were sent."""
        self.blocks: list[tuple[WorkerId, Block]] = []
        """Worker and block of all finished groups."""
        self.recording: Recording | None = None
        self._calls = TaskGroup()
        self._balancer: LoadBalancer | None = None
        self._stopped = False
        self._attempt, self._weights = 0, weights
        self._first_chunk = 0
        self._losses: list[WorkerLostError] = []
        self._account = reports.record.account.rollout(task.node) if self._training else None
        for group, prompt in self._groups_of(carried):
            if prompt.begun is not None:
                self._begun[group] = prompt.begun
            if self._account is not None and prompt.sampled:
                self._account.carry_in(group, prompt.sampled)
        self._unreported: dict[WorkerId, int] = {}
        """Worker -> tokens that its heartbeats have reported, and no block so far."""
        self._tokens = 0
        self._start: float | None = None
        """Start time of the first server. Before it, servers may wait for weights."""

    def retry(self, run: Run, servers: Sequence[WorkerHandle], weights: PendingWeights | None = None) -> None:
        """Prepare a further attempt. `run` has the shards that are not complete."""
        self._run, self._servers, self._weights = run, servers, weights
        self._attempt, self._first_chunk = self._attempt + 1, len(self.chunks)
        self._calls, self._balancer, self._stopped = TaskGroup(), None, False
        # Partial rollouts may be lost with a machine. Responses start again, with the same random draws; conversations
        # continue if their worker lives.
        dead = self._dead()
        self._begun = {
            group: begun
            for group, begun in self._begun.items()
            if isinstance(begun, PausedGroup) and begun.worker not in dead
        }
        self._losses = []
        if self._account is not None:
            self._account.restart([group for group in self._missing if group not in self._begun])

    def _groups_of(self, carried: Sequence[Carried]) -> Iterator[tuple[int, Carried]]:
        """The group of each prompt. A later, new group may have the same prompt."""
        groups: dict[int, deque[int]] = {}
        for group in self._groups if carried else ():
            groups.setdefault(self._reports.batch.prompt(group), deque()).append(group)
        for prompt in carried:
            if mine := groups.get(prompt.prompt):
                yield mine.popleft(), prompt

    async def run(self) -> None:
        """Sample until the batch is complete. Raises RunError if the servers end early.

        Raises WorkerLostError with the names of all lost servers; no call is pending then.
        """
        batch, groups = self._reports.batch, list(self._missing)
        limits = chunk_limits(await self._request_limits(), len(groups), batch.group_size, len(self._servers))
        if not self._stopped:
            self._balancer = LoadBalancer(groups, len(self._servers), limits, self._servers_of_paused())
            self._send_chunks(self._balancer)
        await self._calls.join()
        self._count_lost()
        if not batch.complete(self._task.name):
            if self._losses:
                first = self._losses[0]
                dead = self._dead()
                first.lost = tuple(dict.fromkeys(worker for loss in self._losses for worker in loss.lost))
                first.alive = tuple(worker for worker in first.lost if worker not in dead)
                raise first
            missing = f"{len(self._missing)} of {len(self._groups)} prompts"
            raise RunError(
                f"{self._task.engine} has ended the responses to {missing} early, without an abort",
                node=f"{self._task.name} (step {self._run.step})",
            )

    def lose(self, loss: WorkerLostError) -> None:
        """A server was lost, perhaps in the weight sync that this rollout waits for: stop the others."""
        self._losses.append(loss)
        if not self._stopped:
            self._stop(interrupted=True)

    def _dead(self) -> set[WorkerId]:
        return {worker for loss in self._losses for worker in loss.dead}

    def unfinished(self) -> list[Carried]:
        assert self._account is not None, "a validation finishes all prompts"
        prompt = self._reports.batch.prompt
        if self._node.partial_rollout:
            self._reports.record.account.end(self._missing, "carried_out")
        begun = self._begun if self._node.partial_rollout else {}
        return [Carried(prompt(group), begun.get(group), self._account.left(group)) for group in self._missing]

    async def _request_limits(self) -> RequestLimits:
        """Number of rows that a server accepts. The engine's limits never change, so only the first server is queried,
        once.
        """
        longest = self._longest()
        request_limits, key = self._reports.request_limits, (str(self._task.engine), longest)
        if key not in request_limits:
            what = f"{self._task.engine} to report its request limits"
            request_limits[key] = await self._servers[0].call(what, Worker.request_limits, longest)
        if self._node.agent_spec is None:
            return request_limits[key]
        running = self._node.agent_spec.max_running * (self._node.rows_per_sample if self._training else 1)
        return agent_limits(running, request_limits[key])

    def _longest(self) -> int:
        name = self._task.node
        usual = self._node.sampling if self._training else self._pipeline.val_sampling(name)
        own = self._pipeline.own_samplings(name, validation=not self._training)
        response = max(sampling.max_new_tokens for sampling in (usual, *own.values()))
        return (self._node.max_prompt_tokens or self._pipeline.data.max_prompt_tokens) + response

    def _servers_of_paused(self) -> dict[int, int]:
        """Group -> the server whose worker has paused its agents or responses."""
        numbers = {server.id: number for number, server in enumerate(self._servers)}
        return {
            group: numbers[begun.worker]
            for group, begun in self._begun.items()
            if isinstance(begun, PausedGroup) and begun.worker in numbers
        }

    # -- to the servers

    def _send_chunks(self, balancer: LoadBalancer) -> None:
        for server, groups in balancer.next_chunks():
            self._calls.start(self._guard(self._follow(balancer, server, groups)))

    def _stop(self, *, interrupted: bool = False) -> None:
        """`interrupted`: a further attempt continues the conversations."""
        self._stopped = True
        if self._balancer is not None:
            self._balancer.stop()
        rollout = RolloutId(self._run.step, self._task.name, self._run.round, self._attempt)
        for server in self._servers:
            what = f"{server.id} to abort what {self._task.name} no longer needs"
            self._calls.start(self._guard(server.call(what, Worker.abort, rollout, interrupted=interrupted)))

    async def _guard(self, call: Coroutine[Any, Any, None]) -> None:
        """If the server is lost, let the others finish before the failure is raised."""
        try:
            await call
        except WorkerLostError as loss:
            if not loss.lost:
                raise
            self.lose(loss)

    async def _follow(self, balancer: LoadBalancer, server: int, groups: Sequence[int]) -> None:
        worker, reports = self._servers[server], self._reports
        self.chunks.append((server, groups))
        work = dispatch_chunk(
            self._run,
            self._task,
            reports.batch,
            self._pipeline,
            groups,
            committed=self._committed,
            begun=self._begun,
            attempt=self._attempt,
            weights=self._weights,
            gather_s=gather_seconds(len(self._servers)),
        )
        inflight, started = len(groups), False
        async for item in worker.stream(work, reports.record.count_bytes):
            self._start = self._start or time.time()
            if isinstance(item, Heartbeat):
                new = item.sampled_tokens - reports.sampled.get(worker.id, 0)
                self._tokens += new
                self._unreported[worker.id] = self._unreported.get(worker.id, 0) + new
                reports.sampled[worker.id] = item.sampled_tokens
                if not started:
                    started = True
                    balancer.started(server)
                    self._send_chunks(balancer)
            elif item.unfinished:
                self._add_unfinished(item, worker.id)
            else:
                finished = self._add_finished(item, worker.id)
                inflight -= finished
                balancer.finished(server, finished)
                self._send_chunks(balancer)
            self._report_progress()
        balancer.end_chunk(server, inflight)
        self._send_chunks(balancer)

    # -- from the servers

    def _add_finished(self, block: Block, worker: WorkerId) -> int:
        """Add finished groups to the batch; returns their number."""
        batch = self._reports.batch
        arrival = batch.arrived(self._task.name, block.rows)
        batch.add(self._task.name, block)
        self.blocks.append((worker, block))
        self._reports.record.add_block(self._run, replace(block, shards=arrival.shards), worker)
        groups = np.unique(batch.groups(block.rows)).tolist()
        for group in set(groups) - set(arrival.surplus):
            del self._missing[group]
            self._begun.pop(group, None)
        self._count(block, worker)
        self._keep(block, arrival.surplus, worker)
        complete = batch.complete(self._task.name)
        if arrival.complete:
            # After other messages that have arrived: they may complete the batch.
            asyncio.get_running_loop().call_soon(self._report_shards, arrival.complete)
        if complete and self._missing and not self._stopped:
            self._stop()
        return len(groups)

    def _report_shards(self, shards: Sequence[int]) -> None:
        """Report complete shards, unless the rollout ends in a moment and reports the rest itself.

        Otherwise the trainer would start on the last shard while the servers wait for new weights. A round with a
        filter ends when nothing more of it can arrive. With partial rollouts the step, its checkpoint and the next step
        must not be ahead of the prompts that it leaves. A buffer must not add groups to a batch that is not closed.
        """
        leaves = self._training and (self._node.partial_rollout or groups_returned(self._pipeline) > 0)
        ends = self._reports.batch.complete(self._task.name) and (not self._missing or self._task.in_rounds or leaves)
        for shard in () if ends else shards:
            self._reports.shard_done(shard)

    def _add_unfinished(self, block: Block, worker: WorkerId) -> None:
        self._reports.record.add_block(self._run, replace(block, shards=()), worker)
        self._count(block, worker)
        self._keep(block, np.unique(self._reports.batch.groups(block.rows)).tolist(), worker)

    def _count(self, block: Block, worker: WorkerId) -> None:
        if self._account is not None and block.counts:
            self._account.add(block.rows, block.counts, finished=not block.unfinished)
            self._unreported[worker] = self._unreported.get(worker, 0) - int(block.counts["sampled"].sum())

    def _count_lost(self) -> None:
        """Count the samples reported by lost servers."""
        for worker in dict.fromkeys(worker for loss in self._losses for worker in loss.lost):
            mine = [groups for server, groups in self.chunks[self._first_chunk :] if self._servers[server].id == worker]
            groups = [group for chunk in mine for group in chunk if group in self._missing]
            if worker not in self._dead():
                # It has reported what it sampled for the conversations that it has paused.
                groups = [group for group in groups if not isinstance(self._begun.get(group), PausedGroup)]
            if self._account is not None:
                self._account.lose(self._reports.batch.rows_of(groups), max(0, self._unreported.pop(worker, 0)))

    def _keep(self, block: Block, groups: Sequence[int], worker: WorkerId) -> None:
        """Keep the responses begun in groups outside the batch, for ``partial_rollout`` or a further attempt."""
        batch, step = self._reports.batch, self._run.step
        if block.ref is not None and self._node.partial_rollout:
            self._begun |= {group: PartialRollout(block.ref, batch.rows_of((group,))) for group in groups}
        elif block.ref is None and self._node.multi_turn:
            self._begun |= {group: PausedGroup(worker, step, group) for group in groups}

    def _report_progress(self) -> None:
        done, seconds = len(self._groups) - len(self._missing), time.time() - (self._start or time.time())
        self._reports.progress(Progress(self._task.name, self._run.step, done, self._needed, self._tokens, seconds))


class Rollouts:
    """Starts the rollouts of a run, and continues rollouts that lost servers."""

    def __init__(
        self,
        pipeline: Pipeline,
        groups: WorkerGroups,
        syncs: WeightSyncs,
        recorder: Recorder,
        progress: Callable[[Progress], None],
        report: Callable[[ShardDone], None],
    ) -> None:
        """`report` is called for each complete shard but the last ones."""
        self._pipeline, self._groups, self._syncs, self._recorder = pipeline, groups, syncs, recorder
        self._progress, self._report = progress, report
        self._interrupted: dict[tuple[int, str], RolloutController] = {}
        """Step and task -> a rollout that lost servers and will continue."""
        self._on: dict[str, RolloutController] = {}
        """Executor -> the rollout that it runs, or that is queued behind a weight sync."""
        self._sampled: dict[WorkerId, int] = {}
        """See `RolloutReports`."""
        self._request_limits: dict[tuple[str, int], RequestLimits] = {}
        """See `RolloutReports`."""

    async def run(
        self,
        run: Run,
        task: PlannedTask,
        executor: Executor,
        batch: BatchIndex,
        record: StepRecord,
        committed: int,
        carried: Sequence[Carried],
    ) -> RolloutController:
        """Run a rollout, or continue one that lost servers. Raises RunError; see `RolloutController`."""
        servers, weights = self._groups.servers(executor), self._syncs.pending(executor.name)
        if rollout := self._interrupted.pop((run.step, task.name), None):
            rollout.retry(run, servers, weights)
        else:
            # Called before over-sampling, which makes the batch's groups uncertain.
            recording = self._recorder.begin(run, task, executor, batch)

            def shard_done(shard: int) -> None:
                self._report(ShardDone(run.step, task.name, shard, run.round))

            reports = RolloutReports(batch, record, shard_done, self._progress, self._sampled, self._request_limits)
            rollout = RolloutController(
                run, task, self._pipeline, servers, reports, committed=committed, carried=carried, weights=weights
            )
            rollout.recording = recording
        self._on[task.executor] = rollout
        try:
            await rollout.run()
        except WorkerLostError:
            self._interrupted[run.step, task.name] = rollout
            raise
        finally:
            del self._on[task.executor]
        self._recorder.end(rollout.recording, rollout.blocks, rollout.chunks)
        return rollout

    def lose(self, executor: str, loss: WorkerLostError) -> None:
        """A weight sync lost workers of an executor: its rollout, which may wait for the weights, ends."""
        if rollout := self._on.get(executor):
            rollout.lose(loss)

    def forget(self, workers: Sequence[WorkerId]) -> None:
        """These workers were restarted: their engines count tokens from 0."""
        for worker in workers:
            self._sampled.pop(worker, None)
