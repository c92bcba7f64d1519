"""Runs a recorded node again, with the workers, dispatch and ops of a run, and compares what it gives."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import numpy as np

from dagrl.data.batch import Batch
from dagrl.data.column_store import DamagedColumnError
from dagrl.data.stats import Stat, merge
from dagrl.orchestrator.records.files import RecordedInputs, RecordedOutputs, RecordedRun, RecordError, Records
from dagrl.orchestrator.replay.chain import Chain
from dagrl.orchestrator.replay.compare import Difference, compare_columns, compare_metrics, compare_weights
from dagrl.orchestrator.replay.ranks import ClusterRanks, LocalRank, Ranks, WorkerBlock, columns_of
from dagrl.orchestrator.replay.target import ReplayTarget
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.orchestrator.steps.dispatch import dispatch, dispatch_chunk
from dagrl.scheduler.commands import Run
from dagrl.scheduler.plan import PlannedTask
from dagrl.weight_sync.protocol import WeightDigests
from dagrl.workers.cluster.ray_cluster import cluster
from dagrl.workers.errors import RunError
from dagrl.workers.groups.worker_group import WorkerGroups
from dagrl.workers.messages import StartEngine


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of one run of a node."""

    batch: Batch | None
    """Its columns; None if it writes none."""
    stats: Mapping[str, Stat]
    weights: WeightDigests


@dataclass(slots=True)
class ReplayOutcome:
    """What a replay has found."""

    compared: list[str] = field(default_factory=list)
    """What was compared, for example ``column ref_logprob``."""
    differences: list[Difference] = field(default_factory=list)
    not_recorded: bool = False
    """Whether the run ended before the node did, so that there is nothing to compare."""
    failure: RunError | None = None
    """How the node failed, now."""

    @property
    def largest(self) -> float:
        """The largest relative difference; 0 if all is equal to the bit."""
        return max((difference.size for difference in self.differences), default=0.0)


def replay(target: ReplayTarget, run_dir: Path, note: Callable[[str], None], *, debug: bool = False) -> ReplayOutcome:
    """Run a node again. Raises RecordError if its record is damaged, RunError if its engine does not start.

    `note` is called with what is being done. With `debug` everything runs in this process.
    """
    records = Records(run_dir.resolve())
    with TemporaryDirectory(prefix="dagrl-replay-") as made, _on_this_machine():
        folder = Path(made)
        with cluster(target.pipeline, folder / "logs", note) as ray:
            try:
                return asyncio.run(_replay(ray, target, records, folder, note, debug))
            except DamagedColumnError as error:
                raise RecordError(f"the record is incomplete, cut off by a kill or a full disk: {error}") from error


@contextmanager
def _on_this_machine() -> Iterator[None]:
    """A replay is alone: it does not join a cluster that happens to run, unless RAY_ADDRESS names it."""
    if "RAY_ADDRESS" in os.environ:
        yield
        return
    os.environ["RAY_ADDRESS"] = "local"
    try:
        yield
    finally:
        del os.environ["RAY_ADDRESS"]


async def _replay(
    ray: ModuleType,
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
            return await _Replay(ray, target, records, local).run(note)
        finally:
            local.close()
    groups = WorkerGroups(ray, target.plan, target.pipeline)
    try:
        await groups.launch(common, None, note)
        return await _Replay(ray, target, records, ClusterRanks(groups, target.plan, target.pipeline)).run(note)
    finally:
        with suppress(asyncio.CancelledError):
            await groups.close()


class _Replay:
    """One replay, on ranks that have started."""

    def __init__(self, ray: ModuleType, target: ReplayTarget, records: Records, ranks: Ranks) -> None:
        self._ray, self._target, self._records, self._ranks = ray, target, records, ranks

    async def run(self, note: Callable[[str], None]) -> ReplayOutcome:
        target = self._target
        if target.chain is not None:
            note(str(target.chain))
            await self._restore(target.chain)
        outcome = ReplayOutcome()
        for recorded in target.record.runs:
            try:
                found = await self._again(target.task, target.record.step, recorded)
            except RunError as failure:
                outcome.failure = failure
                outcome.not_recorded = recorded.outputs is None
                return outcome
            if recorded.outputs is None:
                outcome.not_recorded = True
            else:
                self._compare(recorded.outputs, found, outcome)
        return outcome

    async def _restore(self, chain: Chain) -> None:
        """Bring engines to the weights with which the node began."""
        if chain.folder is not None:
            await self._ranks.load(chain.engine, (chain.folder / chain.engine).resolve())
        for update in chain.updates:
            task = self._target.plan.task(update.node)
            await self._again(task, update.step, RecordedRun(inputs=update.inputs))
        if self._target.record.executor != chain.engine:
            version = max((update.step for update in chain.updates), default=chain.step)
            await self._ranks.sync(chain.engine, self._target.record.executor, version)

    async def _again(self, task: PlannedTask, step: int, recorded: RecordedRun) -> Replayed:
        plan, pipeline, inputs = self._target.plan, self._target.pipeline, recorded.inputs
        run = Run(step, task.name, inputs.shards, inputs.round)
        batch = self._batch(inputs)
        if task.generates:
            chunks = recorded.outputs.chunks if recorded.outputs else []
            sent = chunks or [(0, batch.groups_in(batch.rows(run.shards)))]
            work = [
                (server, dispatch_chunk(run, task, batch, pipeline, groups, committed=step - 1, begun={}))
                for server, groups in sent
            ]
            return _result(await self._ranks.sample(task.executor, work), {})
        shares = dispatch(
            run, task, plan.executors[task.executor], batch, pipeline,
            position=0, committed=step - 1, kl_weight=inputs.kl_weight,
        )  # fmt: skip
        blocks = await self._ranks.run(task.executor, shares)
        told = recorded.outputs is not None and recorded.outputs.weights
        return _result(blocks, await self._ranks.digests(task.executor) if told else {})

    def _batch(self, inputs: RecordedInputs) -> BatchIndex:
        """The batch as the run saw it, with its columns in Ray's object store. Raises DamagedColumnError."""
        rows = {each.shard: np.array(each.rows, dtype=np.int64) for each in inputs.rows}
        tokens = np.zeros(1 + max((int(each.max(initial=-1)) for each in rows.values()), default=-1), dtype=np.int64)
        for each in inputs.rows:
            tokens[rows[each.shard]] = each.tokens
        shards = self._target.pipeline.schedule.shards_per_step
        batch = BatchIndex.recorded(self._target.record.group_size, shards, rows, tokens)
        for task, blocks in inputs.sources.items():
            for block in blocks:
                columns = self._records.columns.get_block(block)
                batch.promise(task, columns.rows, self._ray.put(columns))
        return batch

    def _compare(self, recorded: RecordedOutputs, found: Replayed, outcome: ReplayOutcome) -> None:
        batch = joined(self._records, recorded)
        if batch is not None:
            outcome.compared += [f"column {name}" for name in batch.columns]
            there = found.batch
            missing = batch.rows[~np.isin(batch.rows, there.rows)] if there is not None else batch.rows
            if there is None or len(missing):
                text = f"{len(missing)} of {len(batch)} rows are missing, the first is row {missing[0]}"
                outcome.differences.append(Difference("rows", text, float("inf"), tuple(missing.tolist())))
            else:
                outcome.differences += compare_columns(batch, there.in_order(batch.rows))
        if self._target.task.trains:
            outcome.compared += [f"metric {name}" for name in recorded.metrics]
            outcome.differences += compare_metrics(recorded.stats(), found.stats)
        if recorded.weights:
            outcome.compared.append(f"weights ({len(recorded.weights)} tensors)")
            if (difference := compare_weights(recorded.weights, found.weights)) is not None:
                outcome.differences.append(difference)


def joined(records: Records, outputs: RecordedOutputs) -> Batch | None:
    """All rows that a run has given, by row id; None if it wrote no columns. Raises DamagedColumnError."""
    blocks = [records.columns.get_block(each.block) for each in outputs.blocks]
    return _together([block for block in blocks if block.columns])


def _result(blocks: Sequence[WorkerBlock], weights: WeightDigests) -> Replayed:
    batches = [batch for _, block in blocks if not block.unfinished and (batch := columns_of(block)) is not None]
    return Replayed(_together(batches), merge(block.stats for _, block in blocks), weights)


def _together(batches: Sequence[Batch]) -> Batch | None:
    if not batches:
        return None
    whole = Batch.concat(batches)
    return whole.take(np.argsort(whole.rows, kind="stable"))
