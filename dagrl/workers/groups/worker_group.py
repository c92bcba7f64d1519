"""The workers of a run, by executor: placed, started, called as gangs, closed. Every wait has a bound and a name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from dagrl.backends.base import EngineLostError
from dagrl.config.residency import Residency
from dagrl.config.schema import Pipeline
from dagrl.scheduler.plan import HOST, Executor, Plan
from dagrl.scheduler.time_sharing import residency_after_start, start_chains
from dagrl.weight_sync.channel import PeerError
from dagrl.workers.errors import RunError, WorkerDiedError, WorkerHungError, WorkerLostError
from dagrl.workers.groups.daemon_thread import apart
from dagrl.workers.groups.load_balancer import MOST_PORTIONS
from dagrl.workers.groups.object_cache import Holdings
from dagrl.workers.groups.setups import live_together, setups
from dagrl.workers.groups.slots import Slots
from dagrl.workers.groups.task_group import together
from dagrl.workers.messages import Beat, Block, StartEngine, TaskWork, Told, Whereabouts
from dagrl.workers.objects import ObjectsLateError
from dagrl.workers.serialization import Parcel, pack, parcel_bytes, unpack
from dagrl.workers.streams import next_pair

type Tally = Callable[[int], None]
"""Hears the weight of each message to or from a worker, in bytes."""

_CLOSE_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 20.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_THREADS = MOST_PORTIONS + 8
"""Of a worker that generates: for all that it may be handed at once, and for what it is told meanwhile."""
_NOWHERE = Whereabouts("", "", 0, 0, ())
"""Of a worker that has not started yet."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """How long to wait."""

    seconds: float
    key: str
    """Of ``run``, that sets it."""


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of an executor."""

    name: str
    """``executor/rank``."""
    actor: Any
    at: Whereabouts
    holdings: Holdings | None = None
    """What it has of the driver's; None where it keeps nothing, or takes up several calls at once."""

    @property
    def where(self) -> str:
        """The worker, for messages."""
        return f"{self.name} (host {self.at.host}, pid {self.at.pid})"


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of a worker's method, on its way or under way."""

    member: Member
    waits_for: str
    """What is waited for with it."""
    answer: Any
    """Ref of what the method will have returned, for other workers too."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A worker's share of a run, on its way or under way."""

    member: Member
    node: str
    """What it is, for messages."""
    message: Any
    """Ref of what is told of it."""
    columns: Any
    """Ref of the object that will hold its columns, if there are any."""


class Fleet:
    """All workers of a run."""

    def __init__(self, ray: ModuleType, plan: Plan, pipeline: Pipeline) -> None:
        self._ray = ray
        self._plan = plan
        self._pipeline = pipeline
        self._members: dict[str, list[Member]] = {}
        self._slots = Slots(ray, plan, pipeline)
        self._start_bound = _Bound(pipeline.run.start_timeout_s, "start_timeout_s")
        self._node_bound = _Bound(pipeline.run.node_timeout_s, "node_timeout_s")
        self._setup: StartEngine | None = None
        self._lost: dict[str, set[int]] = {}
        """Executor -> ranks that have been given up and not been started again."""
        self._heard: dict[str, float] = {}
        """When a worker's running task last gave a sign of life, or was over, by the loop's clock."""

    def members(self, executor: str) -> list[Member]:
        """The workers of an executor, by rank."""
        return self._members[executor]

    # -- beginning and end

    async def launch(self, setup: StartEngine, resumed_from: Path | None, note: Callable[[str], None]) -> None:
        """Place all workers and make each the rank that it is to be; `setup` holds what they have in common.

        What is trained loads its state from the checkpoint `resumed_from`. `note` hears of each engine that is there.
        """
        self._setup = setup
        for name, executor in self._plan.executors.items():
            self._members[name] = await self._place(executor, range(executor.ranks))
        for name, members in self._members.items():
            self._members[name] = await self._find(members, f"the workers of {name} to start")
        await together([self._start_chain(chain, setup, resumed_from, note) for chain in start_chains(self._plan)])

    def may_lose(self, name: str) -> bool:
        """Whether the workers of an executor can be started again while others live: they only generate."""
        executor = self._plan.executors[name]
        return not executor.trained and self._plan.generates(name)

    def lose(self, lost: Iterable[str]) -> None:
        """Give workers up, by name, and those that cannot live without them: a server's. They are ended."""
        for name in lost:
            executor, _, rank = name.rpartition("/")
            for each in live_together(self._plan.executors[executor], self._pipeline, int(rank)):
                self._lost.setdefault(executor, set()).add(each)
                self._ray.kill(self._members[executor][each].actor)

    async def restart(self, name: str) -> list[str]:
        """Start the lost workers of an executor again, on their slots; their names. Its others are left alone."""
        assert self._setup is not None, "restart before launch"
        executor, ranks, members = self._plan.executors[name], sorted(self._lost[name]), self._members[name]
        for rank in ranks:
            # After a restart that has failed some are there, and have to make room.
            self._ray.kill(members[rank].actor)
        for rank, member in zip(ranks, await self._place(executor, ranks), strict=True):
            members[rank] = member
            self._heard.pop(member.name, None)
        names = [members[rank].name for rank in ranks]
        try:
            found = await self._find([members[rank] for rank in ranks], f"{', '.join(names)} to start again")
            for rank, member in zip(ranks, found, strict=True):
                members[rank] = member
            await self._start(executor, self._setup, ranks)
        except WorkerLostError:
            raise
        except RunError as error:
            raise _beyond_restart(error, ", ".join(names)) from error
        del self._lost[name]
        return names

    async def _place(self, executor: Executor, ranks: Iterable[int]) -> list[Member]:
        """New workers for these ranks; they may not have started yet."""
        assert self._setup is not None
        name, generates = executor.name, self._plan.generates(executor.name)
        actors = await self._slots.place(executor, self._setup.run_dir, _THREADS if generates else 1, ranks)
        return [
            Member(f"{name}/{rank}", actor, _NOWHERE, None if generates or name == HOST else Holdings())
            for rank, actor in zip(ranks, actors, strict=True)
        ]

    async def _find(self, members: Iterable[Member], waits_for: str) -> list[Member]:
        """The same, once they have started and said where they are."""

        async def find(member: Member) -> Member:
            what = f"{waits_for}; are there enough free CPUs and GPUs?"
            return replace(member, at=await self._call(member, "describe", (), bound, what))

        bound = self._start_bound
        return await together([find(member) for member in members])

    async def _start_chain(
        self, chain: tuple[str, ...], setup: StartEngine, resumed_from: Path | None, note: Callable[[str], None]
    ) -> None:
        """Start executors one after the other; those that sleep make room for the next."""
        there: list[str] = []
        clock = asyncio.get_running_loop().time
        for name in chain:
            executor, began = self._plan.executors[name], clock()
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
            if name != HOST:
                note(f"{name} is there, after {clock() - began:.0f} s")

    async def _start(self, executor: Executor, setup: StartEngine, ranks: Iterable[int] | None = None) -> None:
        """Make the workers of an executor its ranks: all of them, or these."""
        members, bound = self._members[executor.name], self._start_bound
        told = setups(executor, [member.at for member in members], setup)
        what = f"engine {executor.name} to start"
        starts = []
        for rank in range(executor.ranks) if ranks is None else ranks:
            starts.append(self._call(members[rank], "start", (told[rank],), bound, what))
        await together(starts)

    async def close(self) -> None:
        """Let every worker free what it holds, for a few seconds at most; then end them."""
        everyone = [member for members in self._members.values() for member in members]
        # Whoever fails to free something is ended all the same, and nobody is told.
        closing = asyncio.gather(*(_awaited(each.actor.close.remote()) for each in everyone), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closing, _CLOSE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End every worker now."""
        for members in self._members.values():
            for member in members:
                self._ray.kill(member.actor)
        self._slots.release()
        self._members = {}

    async def abandon(self) -> None:
        """End every worker after a failure; those that cannot be reached within a bound are left to Ray."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(apart(self.kill), _KILL_TIMEOUT_S)

    # -- work

    async def call(self, member: Member, method: str, *args: Any, waits_for: str) -> Any:
        """Call a method on one worker."""
        return await self._call(member, method, args, self._node_bound, waits_for)

    async def call_all(self, executor: str, method: str, *args: Any, waits_for: str) -> list[Any]:
        """Call a method on all ranks of an executor; their results by rank."""
        asked = self.ask_all(executor, method, *args, waits_for=waits_for)
        return await together([self.hear(each) for each in asked])

    def ask_all(self, executor: str, method: str, *args: Any, waits_for: str) -> list[Asked]:
        """Call a method on all ranks of an executor, behind what they are at; see `hear`."""
        parcel = pack((method, args))
        return [self._ask(member, parcel, waits_for) for member in self._members[executor]]

    async def hear(self, asked: Asked) -> Any:
        """What a method has returned."""
        return await self._heard_within(self._node_bound, asked)

    async def call_until_true(self, executor: str, method: str, *, waits_for: str) -> None:
        """Call a method on all ranks of an executor, again and again, until all of them return True.

        The calls wait their turn behind what the workers are running, and hold nothing up.
        """
        bound = self._node_bound
        deadline = asyncio.get_running_loop().time() + bound.seconds
        pause = _FIRST_PAUSE_S
        while not all(await self.call_all(executor, method, waits_for=waits_for)):
            if asyncio.get_running_loop().time() > deadline:
                raise self._too_late(bound, waits_for)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def stream(self, member: Member, work: TaskWork, tally: Tally) -> AsyncIterator[Block | Beat]:
        """Run a task on one worker, block by block; `tally` hears what each parcel weighs, in bytes.

        The columns are the driver's: they outlive the worker. See `Worker.run_streamed`.
        """
        bound, node = self._node_bound, f"{work.task} (step {work.step})"

        async def read(ref: Any) -> Any:
            what = f"a sign of life of {node} from {member.where}"
            return await self._bounded(partial(_awaited, ref), bound, what, node, member)

        with self._failures_of(member, node):
            yielded = member.actor.run_streamed.remote(*_packed(work, tally))
            while (pair := await next_pair(yielded, read)) is not None:
                self._heard[member.name] = asyncio.get_running_loop().time()
                columns, message = pair
                told: Told = _unpacked((message, [columns]), tally)
                for each in told.messages:
                    yield each
                if told.last:
                    # That its stream has ended too would be a message more, on which a step waits.
                    return

    def send(self, member: Member, work: TaskWork, tally: Tally) -> Sent:
        """Have one worker run a task that does not stream, behind what it is at. `tally` as in `stream`; see `answer`.

        One message there and one back: a stream takes more for each block, and one to end.
        """
        node = f"{work.task} (step {work.step})"
        if member.holdings:
            work = member.holdings.abridge(work)
        with self._failures_of(member, node):
            message, columns = member.actor.run_whole.remote(*_packed(work, tally))
        if member.holdings:
            member.holdings.will_have(columns, work)
        return Sent(member, node, message, columns)

    async def answer(self, sent: Sent, tally: Tally) -> list[Block]:
        """All that a worker has made of what it was sent."""
        bound, node, member = self._node_bound, sent.node, sent.member
        with self._failures_of(member, node):
            what = f"a sign of life of {node}, from {member.where}"
            told = await self._bounded(partial(_awaited, sent.message), bound, what, node, member)
        # What was sent behind it begins now.
        self._heard[member.name] = asyncio.get_running_loop().time()
        return _unpacked((told, [sent.columns]), tally)

    async def _call(self, member: Member, method: str, args: tuple, bound: _Bound, waits_for: str) -> Any:
        return await self._heard_within(bound, self._ask(member, pack((method, args)), waits_for))

    def _ask(self, member: Member, parcel: Parcel, waits_for: str) -> Asked:
        with self._failures_of(member, waits_for):
            return Asked(member, waits_for, member.actor.call.remote(*parcel))

    async def _heard_within(self, bound: _Bound, asked: Asked) -> Any:
        member = asked.member
        with self._failures_of(member, asked.waits_for):
            what = f"{asked.waits_for}, from {member.where}"
            return await self._bounded(partial(_awaited, asked.answer), bound, what, asked.waits_for, member)

    @contextmanager
    def _failures_of(self, member: Member, node: str) -> Iterator[None]:
        """Within the context Ray's errors become the run's."""
        try:
            yield
        except self._ray.exceptions.RayError as error:
            raise self._translated(error, member, node) from error

    async def _bounded(
        self, wait: Callable[[], Awaitable[Any]], bound: _Bound, waits_for: str, node: str, member: Member
    ) -> Any:
        """What `wait` comes to; where it takes too long, it is called again for as long as the worker lives."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        deadline = begun + bound.seconds
        while True:
            # Not a task of its own: this is done for every message.
            patience = asyncio.timeout_at(deadline)
            try:
                async with patience:
                    return await wait()
            except TimeoutError:
                if not patience.expired():
                    raise
            # What stands behind a running task waits anew whenever that shows that it is alive.
            deadline = max(begun, self._heard.get(member.name, begun)) + bound.seconds
            if deadline <= clock():
                raise self._too_late(bound, waits_for, node, member)

    def _too_late(self, bound: _Bound, waits_for: str, node: str = "", member: Member | None = None) -> RunError:
        # Whoever does not even start is no loss; a second try would wait as long.
        kind = RunError if member is None or bound is self._start_bound else WorkerHungError
        error = kind(
            f"waited {bound.seconds:g} s for {waits_for}",
            node=node,
            worker=member.where if member else "",
            hint=f"raise run.{bound.key} if it needs longer",
        )
        return _lost(error, member) if member and isinstance(error, WorkerLostError) else error

    def _translated(self, error: Exception, member: Member, node: str) -> RunError:
        """What a Ray error means for the user."""
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.RayTaskError):
            cause = error.cause if error.cause is not None else error
            name = "" if isinstance(cause, ValueError | OSError) else f"{type(cause).__name__}: "
            text, told = f"{name}{cause}".strip(), {"node": node, "worker": member.where, "details": str(error)}
            if isinstance(cause, EngineLostError):
                return _lost(WorkerLostError(text, **told), member)
            if isinstance(cause, PeerError | ObjectsLateError | exceptions.RayError):
                # Its own part is well; somebody that it depends on is not, and will be told of by others. Ray goes on
                # about that for paragraphs.
                return WorkerLostError(text.partition(". ")[0].partition("\n")[0], **told)
            return RunError(text, **told)
        if isinstance(error, exceptions.RayActorError):
            died = WorkerDiedError(
                "the worker's process died",
                node=node,
                worker=member.where,
                hint="was it killed, or out of memory (see `dmesg`)? `dagrl run` goes on from the last checkpoint",
                details=str(error),
            )
            return _lost(died, member)
        said = str(error).partition(". ")[0].partition("\n")[0]
        return WorkerLostError(f"{type(error).__name__}: {said}", node=node, worker=member.where, details=str(error))


def _lost(error: WorkerLostError, member: Member) -> WorkerLostError:
    """The error, of this worker."""
    error.lost = (member.name,)
    return error


def _beyond_restart(error: RunError, which: str) -> WorkerLostError:
    """What it means that lost workers do not start again: others must go too, and whatever was in their way."""
    return WorkerLostError(
        f"{which} could not be started again: {error.cause}",
        node=error.node,
        worker=error.worker,
        hint=error.hint,
        details=error.details,
    )


def _packed(message: TaskWork, tally: Tally) -> Parcel:
    parcel = pack(message)
    tally(parcel_bytes(*parcel))
    return parcel


def _unpacked(parcel: Parcel, tally: Tally) -> Any:
    tally(parcel_bytes(*parcel))
    return unpack(*parcel)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
