"""The workers of a run, by executor: placed, started, called as gangs, closed. Every wait has a bound and a name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from dagrl.plan.plan import Executor, Plan
from dagrl.runtime.crew import together
from dagrl.runtime.dealing import MOST_PORTIONS
from dagrl.runtime.errors import RunError, WorkerDiedError
from dagrl.runtime.messages import Beat, Block, StartEngine, TaskWork
from dagrl.runtime.profiling import python_under_nsys
from dagrl.runtime.worker import Worker
from dagrl.spec.schema import Pipeline

_CLOSE_TIMEOUT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_THREADS = MOST_PORTIONS + 8
"""Of a worker that generates: for all that it may be handed at once, and for what it is told meanwhile."""


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of an executor."""

    name: str
    """``executor/rank``."""
    actor: Any
    host: str
    address: str
    port: int
    pid: int

    @property
    def where(self) -> str:
        """The worker, for messages."""
        return f"{self.name} (host {self.host}, pid {self.pid})"


class Fleet:
    """All workers of a run."""

    def __init__(self, ray: ModuleType, plan: Plan, pipeline: Pipeline) -> None:
        self._ray = ray
        self._plan = plan
        self._pipeline = pipeline
        self._members: dict[str, list[Member]] = {}
        self._placement_groups: dict[str, Any] = {}
        self._heard: dict[str, float] = {}
        """When a worker's running task last gave a sign of life, by the loop's clock."""

    def members(self, executor: str) -> list[Member]:
        """The workers of an executor, by rank."""
        return self._members[executor]

    # -- beginning and end

    async def launch(self, setup: StartEngine) -> None:
        """Place all workers and make each the rank that it is to be; `setup` holds what they have in common."""
        bound = self._pipeline.run.start_timeout_s
        actors = {name: self._place(executor, setup.run_dir) for name, executor in self._plan.executors.items()}
        for name, handles in actors.items():
            described = await self._bounded(
                asyncio.gather(*(self._describe(f"{name}/{rank}", actor) for rank, actor in enumerate(handles))),
                bound,
                f"the workers of {name} to start; are there enough free CPUs and GPUs?",
            )
            self._members[name] = described
        starts = []
        for name, executor in self._plan.executors.items():
            first = self._members[name][0]
            for rank, (member, place) in enumerate(zip(self._members[name], executor.places, strict=True)):
                mine = replace(
                    setup,
                    engine=executor.engines[0] if executor.engines else None,
                    rank=rank,
                    world_size=executor.ranks,
                    replica=place.dp,
                    trained=executor.trained,
                    keeps_start_weights=len(executor.engines) > 1,
                    master_addr=first.address,
                    master_port=first.port,
                )
                starts.append(self._call(member, "start", (mine,), bound, f"engine {name} to start"))
        await together(starts)

    def _place(self, executor: Executor, run_dir: Path) -> list[Any]:
        """Create the actors of an executor on its group's slots."""
        remote = self._ray.remote(Worker)
        if executor.group is None:
            return [remote.options(num_cpus=0).remote() for _ in range(executor.ranks)]
        spec = self._pipeline.groups[executor.group]
        tenants = sum(other.group == executor.group for other in self._plan.executors.values())
        share = {"num_cpus": 1 / tenants} if spec.is_cpu else {"num_cpus": 0, "num_gpus": 1 / tenants}
        generates = any(task.generates for task in self._plan.tasks if task.executor == executor.name)
        actors = []
        for rank in range(executor.ranks):
            python = python_under_nsys(self._pipeline, executor.engines[0], rank, run_dir)
            placed = remote.options(
                **share,
                placement_group=self._placement_group(executor.group),
                placement_group_bundle_index=rank,
                max_concurrency=_THREADS if generates else 1,
                runtime_env={"py_executable": python} if python else None,
            )
            actors.append(placed.remote())
        return actors

    def _placement_group(self, group: str) -> Any:
        from ray.util.placement_group import placement_group

        if group not in self._placement_groups:
            spec = self._pipeline.groups[group]
            slot = {"CPU": 1} if spec.is_cpu else {"GPU": 1}
            self._placement_groups[group] = placement_group([slot] * spec.ranks, strategy="PACK")
        return self._placement_groups[group]

    async def _describe(self, name: str, actor: Any) -> Member:
        host, address, port = await actor.describe.remote()
        return Member(name, actor, host, address, port, await actor.pid.remote())

    async def close(self) -> None:
        """Let every worker free what it holds, for a few seconds at most; then end them."""
        everyone = [member for members in self._members.values() for member in members]
        closing = [asyncio.ensure_future(_awaited(member.actor.close.remote())) for member in everyone]
        if closing:
            await asyncio.wait(closing, timeout=_CLOSE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End every worker now."""
        for members in self._members.values():
            for member in members:
                self._ray.kill(member.actor)
        from ray.util.placement_group import remove_placement_group

        for group in self._placement_groups.values():
            remove_placement_group(group)
        self._members, self._placement_groups = {}, {}

    # -- work

    async def call(self, member: Member, method: str, *args: Any, waits_for: str) -> Any:
        """Call a method on one worker."""
        return await self._call(member, method, args, self._pipeline.run.node_timeout_s, waits_for)

    async def call_all(self, executor: str, method: str, *args: Any, waits_for: str) -> list[Any]:
        """Call a method on all ranks of an executor; their results by rank."""
        bound = self._pipeline.run.node_timeout_s
        calls = [self._call(member, method, args, bound, waits_for) for member in self._members[executor]]
        return await together(calls)

    async def call_until_true(self, executor: str, method: str, *, waits_for: str) -> None:
        """Call a method on all ranks of an executor, again and again, until all of them return True.

        The calls wait their turn behind what the workers are running, and hold nothing up.
        """
        bound = self._pipeline.run.node_timeout_s
        deadline = asyncio.get_running_loop().time() + bound
        pause = _FIRST_PAUSE_S
        while not all(await self.call_all(executor, method, waits_for=waits_for)):
            if asyncio.get_running_loop().time() > deadline:
                raise self._too_late(bound, waits_for)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def stream(self, member: Member, work: TaskWork) -> AsyncIterator[Block | Beat]:
        """Run a task on one worker, block by block."""
        bound = self._pipeline.run.node_timeout_s
        node = f"{work.task} (step {work.step})"
        blocks = member.actor.run.options(num_returns="streaming").remote(work)
        try:
            while True:
                what = f"a sign of life of {node} from {member.where}"
                try:
                    ref = await self._bounded(_awaited(anext(blocks)), bound, what, node, member)
                except StopAsyncIteration:
                    return
                self._heard[member.name] = asyncio.get_running_loop().time()
                yield await ref
        except self._ray.exceptions.RayError as error:
            raise self._translated(error, member, node) from error

    async def _call(self, member: Member, method: str, args: tuple, bound: float, waits_for: str) -> Any:
        try:
            ref = getattr(member.actor, method).remote(*args)
            return await self._bounded(_awaited(ref), bound, f"{waits_for}, from {member.where}", waits_for, member)
        except self._ray.exceptions.RayError as error:
            raise self._translated(error, member, waits_for) from error

    async def _bounded(
        self, awaitable: Any, bound: float, waits_for: str, node: str = "", member: Member | None = None
    ) -> Any:
        clock = asyncio.get_running_loop().time
        begun = clock()
        waiting = asyncio.ensure_future(awaitable)
        try:
            while True:
                # What stands behind a running task waits anew whenever that shows that it is alive.
                heard = self._heard.get(member.name, begun) if member else begun
                left = max(begun, heard) + bound - clock()
                done, _ = await asyncio.wait([waiting], timeout=max(0.0, left))
                if done:
                    return waiting.result()
                if left <= 0:
                    raise self._too_late(bound, waits_for, node, member)
        finally:
            waiting.cancel()

    def _too_late(self, bound: float, waits_for: str, node: str = "", member: Member | None = None) -> RunError:
        return RunError(
            f"waited {bound:g} s for {waits_for}",
            node=node,
            worker=member.where if member else "",
            hint=f"raise run.{'start' if bound == self._pipeline.run.start_timeout_s else 'node'}_timeout_s if it "
            "needs longer",
        )

    def _translated(self, error: Exception, member: Member, node: str) -> RunError:
        """What a Ray error means for the user."""
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.RayTaskError):
            cause = error.cause if error.cause is not None else error
            name = "" if isinstance(cause, ValueError | OSError) else f"{type(cause).__name__}: "
            return RunError(f"{name}{cause}".strip(), node=node, worker=member.where, details=str(error))
        if isinstance(error, exceptions.RayActorError):
            return WorkerDiedError(
                "the worker's process died",
                node=node,
                worker=member.where,
                hint="was it killed, or out of memory (see `dmesg`)? `dagrl run` goes on from the last checkpoint",
                details=str(error),
            )
        return RunError(f"{type(error).__name__}: {error}", node=node, worker=member.where)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
