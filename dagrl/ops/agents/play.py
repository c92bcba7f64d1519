"""The trajectories of one call of a rollout: programs run, their requests go to the engine, replies go back.

    programs --HTTP--> gateway --requests--> engine
       ^                  |                    |
       +----- replies ----+<---- completions --+

The thread that yields the trajectories passes requests on; all else runs on the endpoint's event loop.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.data.batch import Batch
from dagrl.ops.agents.programs import ProgramError, Verdict
from dagrl.ops.agents.rows import Trajectory, responses_of
from dagrl.ops.agents.session import Session
from dagrl.ops.agents.setup import AgentSetup, agent_setup, row_of
from dagrl.ops.agents.tree import TrajectoryTree
from dagrl.ops.base import Context
from dagrl.ops.response import ABORTED, Response
from dagrl.ops.turns.requests import CallEnded, TurnDone, TurnRequests

_GATHER_S = 0.01
"""How long an idle engine that decodes in batches waits for a further request after each."""
_LOOK_EVERY_S = 0.5
"""How often an abort is looked for while programs are busy elsewhere."""


class AgentFailedError(RuntimeError):
    """A program failed, and ``on_error`` is stop."""


@dataclass(frozen=True, slots=True)
class _Asked:
    number: int
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class _Ended:
    row: int
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class _Broken:
    """A fault of dagrl itself in the endpoint's thread."""

    failure: BaseException


type _Event = _Asked | _Ended | _Broken | TurnDone | CallEnded


def play(batch: Batch, requests: Mapping[int, GenerationRequest], context: Context) -> Iterator[tuple[int, Response]]:
    """Yield the row and the response of each row of the batch, all rows of a trajectory together.

    `requests` are those that a rollout without an agent would begin with. After an abort unfinished trajectories are
    left out. Raises AgentFailedError.
    """
    return AgentRollouts(batch, requests, context).run()


@dataclass(slots=True)
class AgentRollouts:
    """The trajectories of one call."""

    batch: Batch
    requests: Mapping[int, GenerationRequest]
    context: Context
    _setup: AgentSetup = field(init=False)
    _events: queue.SimpleQueue[_Event] = field(default_factory=queue.SimpleQueue)
    _queue: TurnRequests = field(init=False)
    _waiting: dict[int, asyncio.Future[Completion]] = field(default_factory=dict)
    """Request -> the future of its reply; only used on the endpoint's loop."""
    _numbers: count[int] = field(default_factory=count)
    _open: set[int] = field(default_factory=set)
    """First rows of the trajectories that have not ended."""
    _busy: int = 0
    """Requests that the engine has."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _aborted: bool = False

    def __post_init__(self) -> None:
        self._setup = agent_setup(self.context)
        self._queue = TurnRequests(self.context.engine, self.context.sampling, self._events.put)
        step = self.context.sequences
        self._open = {row for row in self.requests if not self.batch.rows[row] % step}

    def run(self) -> Iterator[tuple[int, Response]]:
        loop = self._setup.gateway.loop
        try:
            loop.call_soon_threadsafe(self._start)
            while self._open and not (self._aborted and self._queue.idle):
                for event in self._next_events():
                    yield from self._take(event)
                self._aborted = self._aborted or self.context.aborted()
                if not self._aborted:
                    self._queue.flush()
        finally:
            self._queue.leave()
            loop.call_soon_threadsafe(self._cancel)

    # -- in the thread that yields

    def _next_events(self) -> list[_Event]:
        try:
            events = [self._events.get(timeout=_LOOK_EVERY_S)]
        except queue.Empty:
            return []
        serializes = self.context.engine.serializes_calls
        while True:
            gathers = serializes and self._queue.idle and self._busy + len(events) < len(self._open)
            try:
                events.append(self._events.get(timeout=_GATHER_S if gathers else 0.0))
            except queue.Empty:
                return events

    def _take(self, event: _Event) -> Iterator[tuple[int, Response]]:
        match event:
            case _Asked():
                self._busy += 1
                self._queue.ask(event.number, event.request)
            case TurnDone():
                self._busy -= 1
                if event.completion.finish_reason == ABORTED:
                    self._aborted = True
                else:
                    self._setup.gateway.loop.call_soon_threadsafe(self._answer, event.row, event.completion)
            case CallEnded():
                self._queue.call_ended()
                if event.failure is not None:
                    raise event.failure
            case _Ended():
                yield from self._ended(event)
            case _Broken():
                raise event.failure

    def _ended(self, event: _Ended) -> Iterator[tuple[int, Response]]:
        trajectory, spec = event.trajectory, self._setup.spec
        if trajectory.error is not None and spec.on_error == "stop":
            raise AgentFailedError(
                f"the agent `{spec.shown}` failed for sample {self.batch.rows[event.row]}: {trajectory.error}; "
                "`on_error: mask` would leave the sample out"
            )
        self._open.discard(event.row)
        prompt = self.requests[event.row].prompt
        rows, version = self.context.sequences, self.context.engine.policy_version
        responses = responses_of(trajectory, prompt, rows, version=version, zero=spec.on_error == "zero")
        yield from enumerate(responses, event.row)

    # -- on the endpoint's loop

    def _start(self) -> None:
        for row in sorted(self._open):
            task = self._setup.gateway.loop.create_task(self._guarded(self._trajectory(row)))
            self._tasks.append(task)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        for future in self._waiting.values():
            future.cancel()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as failure:  # noqa: BLE001 - raised in the thread that yields
            self._events.put(_Broken(failure))

    async def _trajectory(self, row: int) -> None:
        """Run the program for a row, again if it fails and may."""
        spec = self._setup.spec
        async with self._setup.slots:
            begun = time.monotonic()
            attempts = 1
            session, verdict, error = await self._attempt(row)
            while error is not None and not session.refused and attempts <= spec.retries:
                attempts += 1
                session, verdict, error = await self._attempt(row)
        trajectory = Trajectory(session.tree, verdict, error, session.refused, attempts - 1, time.monotonic() - begun)
        self._events.put(_Ended(row, trajectory))

    async def _attempt(self, row: int) -> tuple[Session, Verdict, str | None]:
        """The session, what the program says of it, and why it failed, if it did."""
        setup, gateway = self._setup, self._setup.gateway
        session, spec = self._session(row), self._setup.spec
        gateway.add(session)
        try:
            program = setup.program.run(gateway.url, session.key, row_of(self.batch, row, self.requests[row].seed))
            verdict = await asyncio.wait_for(program, spec.timeout_s)
        except TimeoutError:
            return session, Verdict(), f"it took longer than timeout_s, {spec.timeout_s:g} s"
        except ProgramError as error:
            return session, Verdict(output=error.output), str(error)
        finally:
            gateway.remove(session)
        if verdict.reward is None and setup.needs_reward:
            return session, verdict, "it gave no reward, which `fn: agent` takes"
        return session, verdict, None

    def _session(self, row: int) -> Session:
        context, request = self.context, self.requests[row]
        node = context.rollout
        longest = node.max_prompt_tokens or context.pipeline.data.max_prompt_tokens
        tree = TrajectoryTree(request.prompt, request.seed, longest, context.sampling.max_new_tokens)
        hermes = node.tool_format == "hermes"
        return Session(tree, self._setup.writer, self._setup.parser, hermes, self._ask, node.max_turns)

    def _ask(self, request: GenerationRequest) -> asyncio.Future[Completion]:
        number, future = next(self._numbers), self._setup.gateway.loop.create_future()
        self._waiting[number] = future
        self._events.put(_Asked(number, request))
        return future

    def _answer(self, number: int, completion: Completion) -> None:
        future = self._waiting.pop(number)
        if not future.done():
            future.set_result(completion)
