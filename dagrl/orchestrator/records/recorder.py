"""Records nodes during a run: the driver notes inputs and outputs, and a CPU worker stores the columns.

Inputs are written when a node starts, so that one that fails can be replayed. A step is committed when its records are
on the disk. A failure to record ends only the recording, not the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import ray

from dagrl.config.loading.loader import LoadedPipeline
from dagrl.config.loading.yaml_source import dump_document
from dagrl.config.schema import RecordSpec
from dagrl.data.column_store import StoredBlock
from dagrl.data.stats import Stat, merge
from dagrl.orchestrator.folder.run_folder import RunFolder
from dagrl.orchestrator.groups.task_group import run_all
from dagrl.orchestrator.groups.worker_group import WorkerGroups
from dagrl.orchestrator.groups.worker_handle import PendingCall
from dagrl.orchestrator.records.files import (
    NodeRecord,
    RecordedBlock,
    RecordedInputs,
    RecordedOutputs,
    RecordedRun,
    Records,
    ShardRows,
    code_hash,
    versions,
)
from dagrl.orchestrator.records.ring import Ring, nonfinite
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.orchestrator.steps.dispatch import NO_INPUTS, OpInputs
from dagrl.scheduler.commands import Run
from dagrl.scheduler.plan import HOST, Executor, Plan, PlannedTask, Rows, WorkerId
from dagrl.tracking.alarms import Alarm
from dagrl.validation.prepare import PreparedPipeline
from dagrl.weight_sync.protocol import WeightDigests
from dagrl.workers.errors import RunError
from dagrl.workers.messages import Block, ColumnsToStore
from dagrl.workers.worker import Worker

_DRAIN_S = 60.0


@dataclass(slots=True)
class Recording:
    """A recorded run of a node."""

    run: Run
    task: PlannedTask
    place: int
    """Its place among the node's runs of the step."""
    weights: list[PendingCall[WeightDigests]] = field(default_factory=list)


class Recorder:
    """Writes the records of one run. Without ``run.record`` it does nothing."""

    def __init__(
        self, prepared: PreparedPipeline, groups: WorkerGroups, folder: RunFolder, note: Callable[[str], None]
    ) -> None:
        """Records of steps after the run's first one are removed, because these steps run again."""
        loaded, plan = prepared.loaded, prepared.plan
        self._plan, self._groups, self._note = plan, groups, note
        self._records = Records(folder.path.resolve())
        self._spec: RecordSpec | None = loaded.pipeline.run.recorded
        self._tasks = recorded_tasks(plan, self._spec.nodes) if self._spec else frozenset()
        self._ring: Ring | None = None
        self._keeps_on = self._spec.keep_on if self._spec else ()
        self._nonfinite: dict[int, str] = {}
        """Step -> a metric of it that is not finite."""
        self._timeout_s = loaded.pipeline.run.node_timeout_s
        self._order: dict[int, int] = {}
        """Step -> runs that have started."""
        self._open: dict[tuple[int, str], NodeRecord] = {}
        self._saved: set[tuple[int, str]] = set()
        self._stored: dict[int, dict[tuple[bytes, str], str]] = {}
        """Step -> object and column (empty: the row ids) -> its name in the store."""
        self._jobs: asyncio.Queue[Awaitable[None]] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None
        self._stopped = self._spec is None
        self._versions = versions() if self._spec else {}
        if self._spec is not None:
            self._begin(self._spec, loaded, folder.start.step)

    def _begin(self, spec: RecordSpec, loaded: LoadedPipeline, start: int) -> None:
        try:
            self._records.remove(
                [step for step in self._records.steps() if step > start],
                [step for step in self._records.saved_states() if step > start],
            )
            if spec.keep_last:
                self._ring = Ring(spec.keep_last, self._records.segments(), self._records.kept())
            self._pipeline = self._records.write_pipeline(dump_document(dict(loaded.resolved)))
            self._code = code_hash(loaded.folder)
        except (OSError, ValueError) as error:
            self._stop(error)

    # -- a run of a node

    def begin(
        self,
        run: Run,
        task: PlannedTask,
        executor: Executor,
        batch: BatchIndex,
        inputs: OpInputs = NO_INPUTS,
    ) -> Recording | None:
        """Called before a node gets its work: queues the calls that record its inputs, without waiting."""
        if self._stopped or task.name not in self._tasks:
            return None
        if self._ring is not None and self._ring.begin(run.step) and executor.trained and not task.frozen:
            self._save_state(run.step - 1, executor)
        order = self._order[run.step] = self._order.get(run.step, 0) + 1
        shards = [(shard, batch.rows((shard,))) for shard in run.shards]
        rows = np.concatenate([ids for _, ids in shards])
        record = self._open.get((run.step, task.node)) or NodeRecord(
            step=run.step, node=task.node, executor=task.executor, trains=task.trains,
            group_size=batch.group_size, runs=[], pipeline=self._pipeline, versions=self._versions, code=self._code,
        )  # fmt: skip
        recorded = RecordedInputs(
            order=order, shards=run.shards, round=run.round,
            ends=not task.pieces or run.shards == task.pieces[-1],
            rows=[ShardRows(shard=s, rows=r.tolist(), tokens=batch.tokens(r).tolist()) for s, r in shards],
            sources={}, kl_weight=inputs.kl_weight, baselines=dict(inputs.baselines),
            returned=tuple(sorted(batch.returned)),
        )  # fmt: skip
        self._open[run.step, task.node] = record.model_copy(
            update={"runs": [*record.runs, RecordedRun(inputs=recorded)]}
        )
        recording = Recording(run, task, len(record.runs))
        wanted: dict[str, list[ColumnsToStore]] = {}
        for producer in task.needs:
            names = tuple(theirs for other, theirs in task.inputs.values() if other == producer)
            wanted[producer] = [ColumnsToStore(ref, names) for ref in batch.objects(producer, rows)]
        self._queue(self._store_inputs(recording, wanted))
        return recording

    def follow(self, recording: Recording | None, executor: Executor) -> None:
        """Called when a node's work is sent: queues the digests of weights right after it."""
        if recording is not None and recording.task.trains and self._inputs(recording).ends:
            what = f"the weights after {recording.task.name} (step {recording.run.step})"
            recording.weights = self._groups[executor.name].submit_all(what, Worker.weight_digests)

    def end(
        self,
        recording: Recording | None,
        blocks: Sequence[tuple[WorkerId, Block]],
        chunks: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> None:
        """Called when a node ends, with its workers' blocks: queues the calls that record them, without waiting."""
        if recording is None or self._stopped:
            return
        stats = merge(block.stats for _, block in blocks)
        if recording.task.trains and (found := nonfinite(recording.task.node, stats)):
            self._nonfinite.setdefault(recording.run.step, found)
        owners = {block.ref: worker for worker, block in blocks if block.ref is not None}
        names = tuple(recording.task.outputs.values())
        wanted = [(worker, ColumnsToStore(ref, names)) for ref, worker in owners.items()]
        self._queue(self._store_outputs(recording, wanted, stats, chunks))

    async def commit(self, step: int, alarms: Sequence[Alarm] = ()) -> None:
        """Wait for the records of a step, which raised `alarms`, and remove records that are no longer needed."""
        if self._spec is None:
            return
        await self._jobs.join()
        incidents = {
            "nonfinite": self._nonfinite.pop(step, None),
            "alarm": alarms[0].condition.text if alarms else None,
        }
        incident = next((incidents[kind] for kind in self._keeps_on if incidents[kind]), None)
        self._stored.pop(step, None)
        self._order.pop(step, None)
        for key in [key for key in self._open if key[0] == step]:
            del self._open[key]
        if self._ring is None or self._stopped:
            return
        if incident:
            self._note(f"step {step}: {incident}; the records of the steps before it are kept")
        dropped = self._ring.commit(step, remarkable=incident is not None)
        try:
            if incident:
                self._records.keep(self._ring.kept)
            for steps in dropped:
                await asyncio.to_thread(self._records.remove, steps, [steps.start - 1])
        except (OSError, ValueError) as error:
            self._stop(error)

    async def drain(self) -> None:
        """Wait briefly for queued records after a failure of the run."""
        if self._writer is not None:
            await asyncio.wait([asyncio.ensure_future(self._jobs.join())], timeout=_DRAIN_S)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
        while not self._jobs.empty():
            job = self._jobs.get_nowait()
            if asyncio.iscoroutine(job):
                job.close()

    # -- jobs, one after the other

    def _queue(self, job: Awaitable[None]) -> None:
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._work())
        self._jobs.put_nowait(job)

    async def _work(self) -> None:
        while True:
            job = await self._jobs.get()
            try:
                await job
            except (RunError, OSError, ValueError) as error:
                self._stop(error)
            finally:
                self._jobs.task_done()

    def _stop(self, error: Exception) -> None:
        if not self._stopped:
            self._stopped = True
            self._note(f"recording has stopped, and the run goes on without it: {error}")

    def _save_state(self, step: int, executor: Executor) -> None:
        """Save the state at the start of a segment. Start weights need none."""
        if step == 0 or (step, executor.name) in self._saved:
            return
        self._saved.add((step, executor.name))
        folder = self._records.state(step)
        what = f"{executor.name} to save its state after step {step} for records"
        calls = self._groups[executor.name].submit_all(what, Worker.save, folder / executor.name)

        async def finish() -> None:
            await run_all([call.result() for call in calls])
            (folder / f"{executor.name}.done").touch()

        self._queue(finish())

    async def _store_inputs(self, recording: Recording, wanted: Mapping[str, Sequence[ColumnsToStore]]) -> None:
        if self._stopped:
            return
        # A worker must not wait for unfinished results, because it may be needed to compute them.
        refs = [columns.ref for blocks in wanted.values() for columns in blocks]
        if refs:
            await asyncio.to_thread(ray.wait, refs, num_returns=len(refs), timeout=self._timeout_s, fetch_local=False)
        flat = [(producer, columns) for producer, blocks in wanted.items() for columns in blocks]
        stored = await self._store(recording.run.step, [columns for _, columns in flat])
        sources: dict[str, list[StoredBlock]] = {producer: [] for producer in wanted}
        for (producer, _), block in zip(flat, stored, strict=True):
            sources[producer].append(block)
        self._change(recording, inputs=self._inputs(recording).model_copy(update={"sources": sources}))

    async def _store_outputs(
        self,
        recording: Recording,
        wanted: Sequence[tuple[WorkerId, ColumnsToStore]],
        stats: Mapping[str, Stat],
        chunks: Sequence[tuple[int, Sequence[int]]],
    ) -> None:
        if self._stopped:
            return
        stored = await self._store(recording.run.step, [columns for _, columns in wanted])
        weights = await run_all([call.result() for call in recording.weights])
        outputs = RecordedOutputs(
            blocks=[RecordedBlock(worker=str(w), block=block) for (w, _), block in zip(wanted, stored, strict=True)],
            metrics={name: (s.count, s.total, s.squares, s.low, s.high) for name, s in stats.items()},
            weights=weights[0] if weights else {},
            chunks=[(server, list(groups)) for server, groups in chunks],
        )
        self._change(recording, outputs=outputs)

    async def _store(self, step: int, wanted: Sequence[ColumnsToStore]) -> list[StoredBlock]:
        """Store the columns that no other record of the step has stored."""
        known = self._stored.setdefault(step, {})
        missing = [
            ColumnsToStore(columns.ref, unknown)
            for columns in wanted
            if (unknown := tuple(name for name in columns.names if (columns.ref.binary(), name) not in known))
            or (columns.ref.binary(), "") not in known
        ]
        if missing:
            host = self._groups[HOST].handles[-1]
            what = f"the records of step {step}"
            stored = await host.call(what, Worker.store_columns, self._records.columns_folder, missing)
            for columns, block in zip(missing, stored, strict=True):
                key = columns.ref.binary()
                known[key, ""] = block.rows
                # Empty for a column that the object lacks.
                known.update({(key, name): block.columns.get(name, "") for name in columns.names})
        blocks = []
        for entry in wanted:
            key = entry.ref.binary()
            names = {name: known[key, name] for name in entry.names if known[key, name]}
            blocks.append(StoredBlock(rows=known[key, ""], columns=names))
        return blocks

    def _inputs(self, recording: Recording) -> RecordedInputs:
        return self._open[recording.run.step, recording.task.node].runs[recording.place].inputs

    def _change(self, recording: Recording, **fields: object) -> None:
        key = recording.run.step, recording.task.node
        runs = [*self._open[key].runs]
        runs[recording.place] = runs[recording.place].model_copy(update=fields)
        self._open[key] = self._open[key].model_copy(update={"runs": runs})
        # Runs without their inputs on the disk could not be replayed.
        complete = [run for run in runs if run.inputs.sources or run.outputs]
        self._records.write(self._open[key].model_copy(update={"runs": complete}))


def recorded_tasks(plan: Plan, nodes: Sequence[str]) -> frozenset[str]:
    """Training tasks of these nodes, and all updates that lead to their weights."""
    named = [task for task in plan.tasks if task.node in nodes and task.rows is Rows.TRAIN]
    sources = {task.executor for task in named if not task.frozen}
    sources |= {plan.executors[name].weights_from or name for name in sources}
    updates = [task for task in plan.tasks if task.trains and task.rows is Rows.TRAIN and task.executor in sources]
    return frozenset(task.name for task in (*named, *updates))
