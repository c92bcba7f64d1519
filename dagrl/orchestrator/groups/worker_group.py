"""The worker groups of a run: they are placed, started, called, restarted and closed here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Concatenate

import ray

from dagrl.config.residency import Residency
from dagrl.config.schema import Pipeline
from dagrl.orchestrator.groups.load_balancer import MAX_OPEN_CHUNKS
from dagrl.orchestrator.groups.slots import SlotAllocator
from dagrl.orchestrator.groups.task_group import run_all, run_in_daemon_thread
from dagrl.orchestrator.groups.worker_handle import PendingCall, Timeout, WorkerHandle
from dagrl.plugins.calls import FOLDER as CALLS
from dagrl.scheduler.plan import HOST, Executor, Plan, WorkerId
from dagrl.scheduler.time_sharing import residency_after_start, start_chains
from dagrl.tracking.base import replace_text
from dagrl.workers.errors import RunError
from dagrl.workers.messages import StartEngine, WorkerInfo
from dagrl.workers.object_cache import CacheView
from dagrl.workers.serialization import serialize
from dagrl.workers.worker import Worker

_CLOSE_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 20.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_GENERATOR_THREADS = MAX_OPEN_CHUNKS + 8
"""Enough threads for all chunks of a rollout, and for concurrent calls."""


class WorkerGroup:
    """The workers of one executor, by rank. An executor on an elastic group may lack some."""

    def __init__(self, handles: Iterable[WorkerHandle] = ()) -> None:
        self.by_rank = {handle.id.rank: handle for handle in handles}

    @property
    def handles(self) -> list[WorkerHandle]:
        """The workers, in the order of their ranks."""
        return [handle for _, handle in sorted(self.by_rank.items())]

    def submit_all[**P, Result](
        self, waits_for: str, method: Callable[Concatenate[Worker, P], Result], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[PendingCall[Result]]:
        """Queue a call of a method on all ranks. The arguments are serialized once."""
        message = serialize((method, args, kwargs))
        return [handle.submit_serialized(waits_for, message) for handle in self.handles]

    async def call_all[**P, Result](
        self, waits_for: str, method: Callable[Concatenate[Worker, P], Result], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Result]:
        return await run_all([call.result() for call in self.submit_all(waits_for, method, *args, **kwargs)])

    async def call_until_true(self, waits_for: str, method: Callable[[Worker], bool]) -> None:
        timeout = self.handles[0].timeout
        clock = asyncio.get_running_loop().time
        deadline, pause = clock() + timeout.seconds, _FIRST_PAUSE_S
        while not all(await self.call_all(waits_for, method)):
            if clock() > deadline:
                raise RunError(
                    f"waited {timeout.seconds:g} s for {waits_for}", hint=f"raise run.{timeout.key} if it needs longer"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


class CpuWorkerPool:
    """Idle CPU workers. The one that has read ahead in the data set is kept for reading, if possible."""

    def __init__(self, handles: Sequence[WorkerHandle]) -> None:
        self._idle = list(handles)
        self._reader: WorkerHandle | None = None

    def take(self, *, reads: bool) -> WorkerHandle:
        """An idle worker. If the task `reads` prompts: the last reader, if it is idle; else any other one, if any."""
        fitting = [handle for handle in self._idle if (handle is self._reader) == reads] or self._idle
        self._idle.remove(handle := fitting[-1])
        if reads:
            self._reader = handle
        return handle

    def give_back(self, handle: WorkerHandle) -> None:
        self._idle.append(handle)


class WorkerGroups:
    """All workers of a run, by executor."""

    def __init__(self, plan: Plan, pipeline: Pipeline) -> None:
        self._plan, self._pipeline = plan, pipeline
        self._groups: dict[str, WorkerGroup] = {}
        self.slots = SlotAllocator(plan, pipeline)
        self._start_timeout = Timeout(pipeline.run.start_timeout_s, "start_timeout_s")
        self._timeout = Timeout(pipeline.run.node_timeout_s, "node_timeout_s")
        self._setup: StartEngine | None = None

    def __getitem__(self, executor: str) -> WorkerGroup:
        return self._groups[executor]

    def servers(self, executor: Executor) -> list[WorkerHandle]:
        """The workers of an executor that take requests: one of each replica."""
        return [handle for handle in self[executor.name].handles if executor.places[handle.id.rank].primary]

    # -- start

    async def launch(self, setup: StartEngine, resumed_from: Path | None, note: Callable[[str], None]) -> None:
        """Place and start all workers. `setup`: their common part.

        Engines that are or were trained load their state from the checkpoint `resumed_from`. `note` is called for each
        engine.
        """
        self._setup = setup
        for name, executor in self._plan.executors.items():
            self._groups[name] = WorkerGroup(await self._place(executor, await self.slots.ranks(executor)))
        described = {
            name: self._describe(group.handles, f"the workers of {name} to start")
            for name, group in self._groups.items()
        }
        preloads = {
            name: self._preload(executor, setup) for name, executor in self._plan.executors.items() if executor.engines
        }
        for name, group in self._groups.items():
            await self._locate(group.handles, described[name])
        chains = start_chains(self._plan)
        await run_all([self._start_chain(chain, setup, resumed_from, note, preloads) for chain in chains])

    async def _place(self, executor: Executor, ranks: Iterable[int]) -> list[WorkerHandle]:
        assert self._setup is not None
        name, generates, run_dir = executor.name, self._plan.generates(executor.name), self._setup.run_dir
        threads = _GENERATOR_THREADS if generates else 1
        actors = await self.slots.place(executor, run_dir, threads, ranks)
        return [
            WorkerHandle(
                WorkerId(name, rank),
                actor,
                self._timeout,
                cache=None if generates or name == HOST else CacheView(),
                run_dir=run_dir,
            )
            for rank, actor in zip(ranks, actors, strict=True)
        ]

    def _describe(self, handles: Iterable[WorkerHandle], waits_for: str) -> list[PendingCall[WorkerInfo]]:
        what = f"{waits_for}; are there enough free CPUs and GPUs?"
        return [handle.submit(what, Worker.describe) for handle in handles]

    async def _locate(self, handles: Sequence[WorkerHandle], described: Iterable[PendingCall[WorkerInfo]]) -> None:
        infos = await run_all([call.result(self._start_timeout) for call in described])
        for handle, info in zip(handles, infos, strict=True):
            handle.info = info

    async def _start_chain(
        self,
        chain: tuple[str, ...],
        setup: StartEngine,
        resumed_from: Path | None,
        note: Callable[[str], None],
        preloads: Mapping[str, list[PendingCall[None]]],
    ) -> None:
        """Start executors that share devices, one after the other. Sleepers make room for the next one."""
        started: list[str] = []
        clock = asyncio.get_running_loop().time
        for name in chain:
            executor, group, begin = self._plan.executors[name], self[name], clock()
            residency = residency_after_start(executor, chain)
            try:
                await run_all([call.result(self._start_timeout) for call in preloads.get(name, ())])
                await self._start(executor, setup, group.by_rank)
                if executor.restored and resumed_from is not None:
                    await group.call_all(f"{name} to load {resumed_from}", Worker.load, resumed_from / name)
                if residency is not Residency.AWAKE:
                    await group.call_all(f"{name} to make room for {chain[-1]}", Worker.sleep, residency)
            except RunError as failure:
                failure.memory = f"group {executor.group}: {', '.join([*started, name])} starting" if started else ""
                raise
            started.append(f"{name} {residency.name.lower()}")
            if name != HOST:
                note(f"{name} is ready, after {clock() - begin:.0f} s")

    def _preload(self, executor: Executor, setup: StartEngine) -> list[PendingCall[None]]:
        """Let the workers import their libraries, which takes many seconds, while others start."""
        what = f"engine {executor.name} to import its libraries"
        handles = self[executor.name].handles
        return [handle.submit(what, Worker.preload, setup.pipeline, executor.engines[0]) for handle in handles]

    async def _start(self, executor: Executor, setup: StartEngine, ranks: Iterable[int]) -> None:
        await self._start_engines(executor, setup, self[executor.name].by_rank, ranks)

    async def _start_engines(
        self, executor: Executor, setup: StartEngine, workers: Mapping[int, WorkerHandle], ranks: Iterable[int]
    ) -> None:
        rank_setups = setups(executor, {rank: worker.info for rank, worker in workers.items()}, setup)
        what = f"engine {executor.name} to start"
        calls = [workers[rank].submit(what, Worker.start, rank_setups[rank]) for rank in ranks]
        await run_all([call.result(self._start_timeout) for call in calls])

    def write_info(self, folder: Path) -> None:
        """Write ``workers.json``: host, process and kind of GPU of each worker. Raises OSError."""
        infos = {str(handle.id): handle.info for name in self._plan.executors for handle in self[name].handles}
        workers = {name: {"host": info.host, "pid": info.pid, "gpu": info.gpu} for name, info in infos.items()}
        replace_text(folder / "workers.json", json.dumps(workers, indent=1))

    # -- lost workers: `worker_failures` says which

    def kill_ranks(self, name: str, ranks: Iterable[int]) -> None:
        for rank in ranks:
            ray.kill(self[name].by_rank[rank].actor)

    async def start_again(self, name: str, ranks: Sequence[int], killed: Collection[int]) -> None:
        """Put new workers on the slots of the killed ranks; the others build their engine again. Raises RunError."""
        assert self._setup is not None, "start_again before launch"
        executor, workers = self._plan.executors[name], self[name].by_rank
        workers |= {handle.id.rank: handle for handle in await self._place(executor, sorted(killed))}
        lost = [workers[rank] for rank in ranks]
        what = f"{', '.join(str(handle.id) for handle in lost)} to restart"
        await self._locate(lost, self._describe(lost, what))
        await self._start(executor, self._setup, ranks)

    # -- workers of elastic groups: `elastic` says which

    async def start_more(self, name: str, ranks: Sequence[int]) -> list[WorkerHandle]:
        """Start workers of an executor that do not belong to it yet. Raises RunError, and kills them."""
        assert self._setup is not None, "start_more before launch"
        executor = self._plan.executors[name]
        handles = await self._place(executor, ranks)
        try:
            what = f"{', '.join(str(handle.id) for handle in handles)} to join"
            await self._locate(handles, self._describe(handles, what))
            await self._start_engines(executor, self._setup, {handle.id.rank: handle for handle in handles}, ranks)
        except BaseException:
            for handle in handles:
                ray.kill(handle.actor)
            raise
        return handles

    def add(self, handles: Iterable[WorkerHandle]) -> None:
        for handle in handles:
            self[handle.id.executor].by_rank[handle.id.rank] = handle

    def remove(self, name: str, ranks: Iterable[int]) -> None:
        for rank in ranks:
            del self[name].by_rank[rank]

    # -- end

    async def close(self) -> None:
        """Let every worker free its resources, for a few seconds at most, then kill it."""

        async def close(handle: WorkerHandle) -> None:
            await handle.submit(f"{handle.id} to close", Worker.close).ref

        closing = asyncio.gather(*map(close, self._handles()), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closing, _CLOSE_TIMEOUT_S)
        await run_in_daemon_thread(self.kill)

    def kill(self) -> None:
        for handle in self._handles():
            ray.kill(handle.actor)
        self.slots.release()
        self._groups = {}
        if self._setup is not None:
            shutil.rmtree(self._setup.run_dir / CALLS, ignore_errors=True)

    async def abandon(self) -> None:
        """Kill every worker after a failure. Ray cleans up workers that cannot be reached in time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(run_in_daemon_thread(self.kill), _KILL_TIMEOUT_S)

    def _handles(self) -> list[WorkerHandle]:
        return [handle for group in self._groups.values() for handle in group.handles]


def setups(executor: Executor, where: Mapping[int, WorkerInfo], common: StartEngine) -> dict[int, StartEngine]:
    """One for each rank of `where`, the places of the ranks' workers; `common`: the part that all workers share.

    The ranks of an engine meet at its first rank, the ranks of a server at the server's first one. The first rank of a
    server on each machine gets all of the server's GPUs there.
    """
    engine = executor.engines[0] if executor.engines else None
    spec = common.pipeline.engines[engine] if engine else None
    group = common.pipeline.groups[str(spec.group)] if spec and spec.replicas_are_servers else None
    rank_setups = {}
    for rank in where:
        place, leader = executor.places[rank], where[min(where)]
        gpus: tuple[str, ...] = ()
        if group is not None:
            per_node = group.gpus_per_node or group.cpus_per_node
            server = [other for other, other_place in enumerate(executor.places) if other_place.dp == place.dp]
            here = [other for other in server if other // per_node == rank // per_node]
            leader = where[server[0]]
            gpus = tuple(gpu for other in here for gpu in where[other].gpus) if rank == here[0] else ()
        rank_setups[rank] = replace(
            common,
            engine=engine,
            rank=rank,
            world_size=executor.ranks,
            trained=executor.trained,
            keeps_start_weights=any(
                common.pipeline.engines[copy].moving_average is None for copy in executor.engines[1:]
            ),
            master_addr=leader.address,
            master_port=leader.port,
            gpus=gpus,
        )
    return rank_setups
