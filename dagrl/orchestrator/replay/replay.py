"""Runs a recorded node again, with the workers, dispatch and ops of a run, and compares the results."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import ray

from dagrl.config.errors import counted
from dagrl.config.schema import Pipeline
from dagrl.data.batch import Batch
from dagrl.data.column_store import DamagedColumnError
from dagrl.data.stats import Stat, merge
from dagrl.ops.work import RolloutWork, TaskWork
from dagrl.orchestrator.cluster.ray_cluster import cluster
from dagrl.orchestrator.groups.task_group import run_all
from dagrl.orchestrator.groups.weight_syncs import WeightSyncs
from dagrl.orchestrator.groups.worker_group import WorkerGroups, setups
from dagrl.orchestrator.groups.worker_handle import WorkerHandle
from dagrl.orchestrator.records.files import RecordedInputs, RecordedOutputs, RecordedRun, RecordError, Records
from dagrl.orchestrator.replay.compare import Difference, compare_columns, compare_metrics, compare_weights
from dagrl.orchestrator.replay.target import Chain, ReplayedRun, ReplayTarget
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.orchestrator.steps.dispatch import OpInputs, dispatch, dispatch_chunk
from dagrl.scheduler.commands import Run, Sync
from dagrl.scheduler.plan import Executor, Plan, PlannedTask
from dagrl.weight_sync.protocol import WeightDigests
from dagrl.workers.errors import RunError
from dagrl.workers.messages import Block, StartEngine
from dagrl.workers.worker import Worker


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of one run of a node."""

    batch: Batch | None
    """Its columns; None if it writes none."""
    stats: Mapping[str, Stat]
    weights: WeightDigests


@dataclass(slots=True)
class ReplayOutcome:
    """The result of a replay."""

    compared: dict[str, list[str]] = field(default_factory=dict)
    """Node -> names of the compared parts."""
    differences: list[Difference] = field(default_factory=list)
    not_recorded: bool = False
    """Whether the run ended before the node, so that no outputs can be compared."""
    failure: RunError | None = None
    """The failure of a node in the replay."""
    failed: str = ""

    def add(self, node: str, *what: str) -> None:
        known = self.compared.setdefault(node, [])
        known += [text for text in what if text not in known]

    @property
    def largest(self) -> float:
        """The largest relative difference; 0 if all is equal to the bit."""
        return max((difference.size for difference in self.differences), default=0.0)


def replay(target: ReplayTarget, run_dir: Path, note: Callable[[str], None], *, debug: bool = False) -> ReplayOutcome:
    """Run the nodes again. Raises RecordError if its record is damaged, RunError if its engine does not start.

    `note` prints a message. With `debug` everything runs in this process.
    """
    records = Records(run_dir.resolve())
    with TemporaryDirectory(prefix="dagrl-replay-") as made, _on_this_machine():
        folder = Path(made)
        with cluster(target.pipeline, folder / "logs", note):
            try:
                return asyncio.run(_replay(target, records, folder, note, debug))
            except DamagedColumnError as error:
                raise RecordError(f"the record is incomplete, cut off by a kill or a full disk: {error}") from error


@contextmanager
def _on_this_machine() -> Iterator[None]:
    """A replay does not join a running cluster unless RAY_ADDRESS names it."""
    if "RAY_ADDRESS" in os.environ:
        yield
        return
    os.environ["RAY_ADDRESS"] = "local"
    try:
        yield
    finally:
        del os.environ["RAY_ADDRESS"]


async def _replay(
    target: ReplayTarget,
    records: Records,
    folder: Path,
    note: Callable[[str], None],
    debug: bool,
) -> ReplayOutcome:
    common = StartEngine(target.pipeline, target.modules, folder)
    if debug:
        local = LocalRank(target.plan.executors, common)
        try:
            return await _Replay(target, records, local, note).run()
        finally:
            local.close()
    groups = WorkerGroups(target.plan, target.pipeline)
    try:
        await groups.launch(common, None, note)
        ranks = ClusterRanks(groups, target.plan, target.pipeline)
        return await _Replay(target, records, ranks, note).run()
    finally:
        with suppress(asyncio.CancelledError):
            await groups.close()


type _Key = tuple[int, int]
"""Step of an update, and its place in the step."""


def _key(step: int, inputs: RecordedInputs) -> _Key:
    return step, inputs.order


class _Replay:
    """One replay, on ranks that have started."""

    def __init__(self, target: ReplayTarget, records: Records, ranks: Ranks, note: Callable[[str], None]) -> None:
        self._target, self._records, self._ranks, self._note = target, records, ranks, note
        self._repeated: dict[str, tuple[Path | None, list[_Key]]] = {}
        """Engine -> its loaded state, and its updates since."""
        self._synced: dict[str, int] = {}
        """Generator -> version of its weights."""

    async def run(self) -> ReplayOutcome:
        outcome = ReplayOutcome()
        for node_run in self._target.runs:
            if node_run.chain is not None:
                await self._restore(node_run.chain, node_run.record.executor)
            recorded = node_run.run.outputs
            try:
                replayed = await self._again(
                    node_run.task, node_run.record.step, node_run.record.group_size, node_run.run
                )
            except RunError as failure:
                outcome.failure, outcome.failed = failure, node_run.record.node
                outcome.not_recorded = recorded is None
                return outcome
            if node_run.task.trains:
                self._repeated[node_run.record.executor][1].append(_key(node_run.record.step, node_run.run.inputs))
            if recorded is None:
                outcome.not_recorded = True
            else:
                self._compare(node_run, recorded, replayed, outcome)
        return outcome

    async def _restore(self, chain: Chain, executor: str) -> None:
        """Bring an executor to the weights with which its node began. They come from the engine of `chain`."""
        engine, wanted = chain.engine, [_key(update.step, update.inputs) for update in chain.updates]
        folder, done = self._repeated.get(engine, (None, []))
        if engine not in self._repeated or folder != chain.folder or wanted[: len(done)] != done:
            if chain.folder is None and done:
                raise RecordError(f"{engine} is past its start weights; replay one node at a time, with --node")
            self._note(str(chain))
            if chain.folder is not None:
                await self._ranks.load(engine, (chain.folder / engine).resolve())
            done = []
        for update in chain.updates[len(done) :]:
            task = self._target.plan.task(update.node)
            await self._again(task, update.step, update.group_size, RecordedRun(inputs=update.inputs))
        self._repeated[engine] = (chain.folder, wanted)
        if executor != engine:
            version = max((update.step for update in chain.updates), default=chain.step)
            if self._synced.get(executor) != version:
                await self._ranks.sync(engine, executor, version)
                self._synced[executor] = version

    async def _again(self, task: PlannedTask, step: int, group_size: int, recorded: RecordedRun) -> Replayed:
        plan, pipeline, inputs = self._target.plan, self._target.pipeline, recorded.inputs
        run = Run(step, task.name, inputs.shards, inputs.round)
        batch = self._batch(inputs, group_size)
        if task.generates:
            chunks = recorded.outputs.chunks if recorded.outputs else []
            sent = chunks or [(0, batch.groups_in(batch.rows(run.shards)))]
            work = [
                (server, dispatch_chunk(run, task, batch, pipeline, groups, committed=step - 1, begun={}))
                for server, groups in sent
            ]
            return _result(await self._ranks.sample(task.executor, work), {})
        kept = OpInputs(kl_weight=inputs.kl_weight, baselines=inputs.baselines)
        executor = plan.executors[task.executor]
        shares = dispatch(run, task, executor, batch, pipeline, committed=step - 1, inputs=kept)
        blocks = await self._ranks.run(task.executor, shares)
        has_digests = recorded.outputs is not None and recorded.outputs.weights
        return _result(blocks, await self._ranks.digests(task.executor) if has_digests else {})

    def _batch(self, inputs: RecordedInputs, group_size: int) -> BatchIndex:
        """The batch of the run, with its columns in Ray's object store. Raises DamagedColumnError."""
        rows = {shard.shard: np.array(shard.rows, dtype=np.int64) for shard in inputs.rows}
        tokens = np.zeros(1 + max((int(ids.max(initial=-1)) for ids in rows.values()), default=-1), dtype=np.int64)
        for shard in inputs.rows:
            tokens[rows[shard.shard]] = shard.tokens
        shards = self._target.pipeline.schedule.shards_per_step
        batch = BatchIndex.recorded(group_size, shards, rows, tokens)
        batch.returned = frozenset(inputs.returned)
        for task, blocks in inputs.sources.items():
            for block in blocks:
                columns = self._records.columns.get_block(block)
                batch.promise(task, columns.rows, ray.put(columns))
        return batch

    def _compare(
        self, node_run: ReplayedRun, recorded: RecordedOutputs, replayed: Replayed, outcome: ReplayOutcome
    ) -> None:
        node, differences = node_run.record.node, list[Difference]()
        batch = self._records.batch(stored.block for stored in recorded.blocks)
        if batch is not None:
            outcome.add(node, *batch.columns)
            there = replayed.batch
            missing = batch.rows[~np.isin(batch.rows, there.rows)] if there is not None else batch.rows
            if there is None or len(missing):
                text = f"{len(missing)} of {len(batch)} rows are missing, the first is row {missing[0]}"
                differences.append(Difference("rows", text, float("inf"), tuple(missing.tolist())))
            else:
                differences += compare_columns(batch, there.in_order(batch.rows))
        if node_run.task.trains:
            outcome.add(node, counted(len(recorded.metrics), "metric"))
            differences += compare_metrics(recorded.stats(), replayed.stats)
        if recorded.weights:
            outcome.add(node, f"{counted(len(recorded.weights), 'tensor')} of weights")
            if (difference := compare_weights(recorded.weights, replayed.weights)) is not None:
                differences.append(difference)
        outcome.differences += [replace(difference, what=f"{node}: {difference.what}") for difference in differences]


def _result(blocks: Sequence[Block], weights: WeightDigests) -> Replayed:
    batches = [batch for block in blocks if not block.unfinished and (batch := columns_of(block)) is not None]
    return Replayed(_together(batches), merge(block.stats for block in blocks), weights)


def _together(batches: Sequence[Batch]) -> Batch | None:
    if not batches:
        return None
    whole = Batch.concat(batches)
    return whole.take(np.argsort(whole.rows, kind="stable"))


def columns_of(block: Block) -> Batch | None:
    if block.ref is None:
        return None
    batch: Batch = block.ref if isinstance(block.ref, Batch) else ray.get(block.ref)
    return batch.in_order(block.rows)


class ClusterRanks:
    """All executors of a replay, as workers of a cluster. The columns of blocks may still be in Ray's object store."""

    def __init__(self, groups: WorkerGroups, plan: Plan, pipeline: Pipeline) -> None:
        self._groups, self._plan = groups, plan
        self._syncs = WeightSyncs(groups, pipeline)

    async def load(self, executor: str, folder: Path) -> None:
        await self._groups[executor].call_all(f"{executor} to load {folder}", Worker.load, folder)

    async def run(self, executor: str, work: Sequence[TaskWork]) -> list[Block]:
        """Run a task, one work for each rank."""
        handles = self._groups[executor].handles
        pending = [handle.submit_task(share, _ignore) for handle, share in zip(handles, work, strict=True)]
        results = await run_all([call.result(_ignore) for call in pending])
        return [block for blocks in results for block in blocks]

    async def sample(self, executor: str, work: Sequence[tuple[int, RolloutWork]]) -> list[Block]:
        """Sample chunks, each on the server of that number; chunks of a server one after the other."""
        servers = self._groups.servers(self._plan.executors[executor])
        by_server: dict[int, list[RolloutWork]] = {}
        for number, chunk in work:
            by_server.setdefault(number % len(servers), []).append(chunk)
        sampled = await run_all([self._chunks(servers[number], chunks) for number, chunks in by_server.items()])
        return [block for blocks in sampled for block in blocks]

    async def _chunks(self, server: WorkerHandle, chunks: Sequence[RolloutWork]) -> list[Block]:
        return [item for chunk in chunks async for item in server.stream(chunk, _ignore) if isinstance(item, Block)]

    async def digests(self, executor: str) -> WeightDigests:
        digests = await self._groups[executor].call_all(f"the weights of {executor}", Worker.weight_digests)
        return digests[0]

    async def sync(self, source: str, follower: str, version: int) -> None:
        async def updated() -> None:
            """Nothing else is running."""

        await self._syncs.run(Sync(version + 1, follower, source, version), updated)


class LocalRank:
    """One rank of each executor, in this process: a debugger can stop in ops and engines."""

    def __init__(self, executors: Mapping[str, Executor], common: StartEngine) -> None:
        self._workers: dict[str, Worker] = {}
        for name, executor in executors.items():
            assert executor.ranks == 1, f"{name} has {executor.ranks} ranks"
            worker = self._workers[name] = Worker()
            worker.start(setups(executor, {0: worker.describe()}, common)[0])

    async def load(self, executor: str, folder: Path) -> None:
        self._workers[executor].load(folder)

    async def run(self, executor: str, work: Sequence[TaskWork]) -> list[Block]:
        return list(self._workers[executor].run(work[0]))

    async def sample(self, executor: str, work: Sequence[tuple[int, RolloutWork]]) -> list[Block]:
        messages = (message for _, chunk in work for message in self._workers[executor].stream(chunk))
        return [item for message in messages for item in message.items if isinstance(item, Block)]

    async def digests(self, executor: str) -> WeightDigests:
        return self._workers[executor].weight_digests()

    async def sync(self, source: str, follower: str, version: int) -> None:
        self._workers[follower].copy_weights(self._workers[source], version)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


type Ranks = ClusterRanks | LocalRank


def _ignore(nbytes: int) -> None:
    """Messages of a replay are not counted."""
