"""The workers of a run, by executor: placed, started, called as gangs, closed. Every wait has a bound and a name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from dagrl.plan.plan import Executor, Plan
from dagrl.plan.turns import residency_after_start, start_chains
from dagrl.runtime.crew import together
from dagrl.runtime.dealing import MOST_PORTIONS
from dagrl.runtime.errors import RunError, WorkerDiedError
from dagrl.runtime.messages import Beat, Block, StartEngine, TaskWork, Whereabouts
from dagrl.runtime.setups import setups
from dagrl.runtime.slots import Slots
from dagrl.spec.residency import Residency
from dagrl.spec.schema import Pipeline

_CLOSE_TIMEOUT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_THREADS = MOST_PORTIONS + 8
"""Of a worker that generates: for all that it may be handed at once, and for what it is told meanwhile."""
_NOWHERE = Whereabouts("", "", 0, 0, ())
"""Of a worker that has not started yet."""


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of an executor."""

    name: str
    """``executor/rank``."""
    actor: Any
    at: Whereabouts

    @property
    def where(self) -> str:
        """The worker, for messages."""
        return f"{self.name} (host {self.at.host}, pid {self.at.pid})"


class Fleet:
    """All workers of a run."""

    def __init__(self, ray: ModuleType, plan: Plan, pipeline: Pipeline) -> None:
        self._ray = ray
        self._plan = plan
        self._pipeline = pipeline
        self._members: dict[str, list[Member]] = {}
        self._slots = Slots(ray, plan, pipeline)
        self._heard: dict[str, float] = {}
        """When a worker's running task last gave a sign of life, by the loop's clock."""

    def members(self, executor: str) -> list[Member]:
        """The workers of an executor, by rank."""
        return self._members[executor]

    # -- beginning and end

    async def launch(self, setup: StartEngine, resumed_from: Path | None) -> None:
        """Place all workers and make each the rank that it is to be; `setup` holds what they have in common.

        What is trained loads its state from the checkpoint `resumed_from`.
        """
        for name, executor in self._plan.executors.items():
            generates = any(task.generates for task in self._plan.tasks if task.executor == name)
            actors = await self._slots.place(executor, setup.run_dir, threads=_THREADS if generates else 1)
            self._members[name] = [Member(f"{name}/{rank}", actor, _NOWHERE) for rank, actor in enumerate(actors)]
        for name, members in self._members.items():
            self._members[name] = await self._bounded(
                asyncio.gather(*(self._find(member) for member in members)),
                self._pipeline.run.start_timeout_s,
                f"the workers of {name} to start; are there enough free CPUs and GPUs?",
            )
        await together([self._start_chain(chain, setup, resumed_from) for chain in start_chains(self._plan)])

    async def _find(self, member: Member) -> Member:
        return replace(member, at=await member.actor.describe.remote())

    async def _start_chain(self, chain: tuple[str, ...], setup: StartEngine, resumed_from: Path | None) -> None:
        """Start executors one after the other; those that sleep make room for the next."""
        there: list[str] = []
        for name in chain:
            executor = self._plan.executors[name]
            residency = residency_after_start(executor, chain)
            try:
                await self._start(executor, setup)
                if executor.trained and resumed_from is not None:
                    what = f"{name} to load {resumed_from}"
                    await self.call_all(name, "load", resumed_from / name, waits_for=what)
                if residency is not Residency.AWAKE:
                    await self.call_all(name, "sleep", residency, waits_for=f"{name} to make room for {chain[-1]}")
            except RunError as failure:
                failure.memory = f"group {executor.group}: {', '.join([*there, name])} starting" if there else ""
                raise
            there.append(f"{name} {residency.name.lower()}")

    async def _start(self, executor: Executor, setup: StartEngine) -> None:
        """Make the workers of an executor its ranks."""
        members, bound = self._members[executor.name], self._pipeline.run.start_timeout_s
        told = setups(executor, [member.at for member in members], setup)
        what = f"engine {executor.name} to start"
        starts = zip(members, told, strict=True)
        await together([self._call(member, "start", (mine,), bound, what) for member, mine in starts])

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
        self._slots.release()
        self._members = {}

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
