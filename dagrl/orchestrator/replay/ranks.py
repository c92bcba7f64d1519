"""The ranks that a replay runs on: the workers of a cluster, or one rank in this process for a debugger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import ray

from dagrl.config.schema import Pipeline
from dagrl.data.batch import Batch
from dagrl.ops.work import RolloutWork, TaskWork
from dagrl.orchestrator.groups.task_group import run_all
from dagrl.orchestrator.groups.weight_syncs import WeightSyncs
from dagrl.orchestrator.groups.worker_group import WorkerGroups, setups
from dagrl.orchestrator.groups.worker_handle import WorkerHandle
from dagrl.scheduler.commands import Sync
from dagrl.scheduler.plan import Executor, Plan
from dagrl.weight_sync.protocol import WeightDigests
from dagrl.workers.messages import Block, StartEngine
from dagrl.workers.worker import Worker


def columns_of(block: Block) -> Batch | None:
    """The columns of a block, with its own rows."""
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
        pending = [handle.submit_task(each, _ignore) for handle, each in zip(handles, work, strict=True)]
        results = await run_all([each.result(_ignore) for each in pending])
        return [block for blocks in results for block in blocks]

    async def sample(self, executor: str, work: Sequence[tuple[int, RolloutWork]]) -> list[Block]:
        """Sample chunks, each on the server of that number; chunks of a server one after the other."""
        servers = self._groups.servers(self._plan.executors[executor])
        by_server: dict[int, list[RolloutWork]] = {}
        for number, each in work:
            by_server.setdefault(number % len(servers), []).append(each)
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
            worker.start(setups(executor, [worker.describe()], common)[0])

    async def load(self, executor: str, folder: Path) -> None:
        self._workers[executor].load(folder)

    async def run(self, executor: str, work: Sequence[TaskWork]) -> list[Block]:
        return list(self._workers[executor].run(work[0]))

    async def sample(self, executor: str, work: Sequence[tuple[int, RolloutWork]]) -> list[Block]:
        messages = (message for _, each in work for message in self._workers[executor].stream(each))
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
