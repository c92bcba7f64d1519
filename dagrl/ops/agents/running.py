"""An agent: one program, its trajectory, and its requests. It may outlive the call of a rollout that started it.

A call answers the requests of its agents. When it is aborted it can pause them: programs keep running, their requests
wait, and a later call answers them, by newer weights. All methods run on the endpoint's event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.environments.failures import FailureClass
from dagrl.ops.agents.results import ProgramError, ProgramResult
from dagrl.ops.agents.rows import Trajectory
from dagrl.ops.agents.session import Ask, Session
from dagrl.ops.agents.setup import AgentSetup
from dagrl.ops.response import ABORTED

if TYPE_CHECKING:
    from dagrl.ops.agents.play import AgentRollouts

_LONGEST_PAUSE_S = 30.0
"""Longest pause before a retry; pauses begin with a second, and double."""


def _now() -> float:
    return asyncio.get_running_loop().time()


class PausableTimeout:
    """A timeout whose clock stops while its agent is paused. Each ``async with`` starts it anew."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._left_s = limit_s, limit_s
        self._timeout: asyncio.Timeout | None = None
        self._paused = False
        self._since = 0.0
        self.seconds = 0.0
        """Time in all contexts, without pauses."""

    async def __aenter__(self) -> None:
        self._left_s, self._since = self._limit_s, _now()
        self._timeout = asyncio.timeout(None if self._paused else self._limit_s)
        await self._timeout.__aenter__()

    async def __aexit__(self, *raised: Any) -> None:
        assert self._timeout is not None
        timeout, self._timeout = self._timeout, None
        if not self._paused:
            self.seconds += _now() - self._since
        await timeout.__aexit__(*raised)

    def pause(self) -> None:
        if not self._paused and self._timeout is not None:
            passed = _now() - self._since
            self.seconds += passed
            self._left_s -= passed
            # It may have expired just now.
            with suppress(RuntimeError):
                self._timeout.reschedule(None)
        self._paused = True

    def go_on(self) -> None:
        if self._paused and self._timeout is not None:
            self._since = _now()
            with suppress(RuntimeError):
                self._timeout.reschedule(self._since + self._left_s)
        self._paused = False


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request whose reply is not complete."""

    request: GenerationRequest
    reply: asyncio.Future[Completion]
    sampled: Completion | None = None
    """The part of the reply sampled by aborted calls."""

    def remaining(self) -> GenerationRequest:
        if self.sampled is None:
            return self.request
        begun = np.concatenate([self.request.begun, self.sampled.tokens])
        limit = self.request.limit
        return replace(self.request, begun=begun, limit=None if limit is None else limit - len(self.sampled.tokens))

    def extend(self, completion: Completion) -> None:
        """Append sampled tokens, and answer the request if they complete the reply."""
        self.sampled = completion = completion if self.sampled is None else _joined(self.sampled, completion)
        if completion.finish_reason != ABORTED and not self.reply.done():
            self.reply.set_result(completion)


def _joined(first: Completion, second: Completion) -> Completion:
    if not len(first.tokens):
        return second
    if not len(second.tokens):
        return replace(first, finish_reason=second.finish_reason)
    return replace(
        second,
        tokens=np.concatenate([first.tokens, second.tokens]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        policy_version=min(first.policy_version, second.policy_version),
        versions=np.concatenate([first.token_versions, second.token_versions]),
    )


@dataclass(slots=True, eq=False)
class Agent:
    """One agent, which starts when a call serves it for the first time."""

    setup: AgentSetup
    task: Mapping[str, object]
    new_session: Callable[[Ask], Session]
    begun: int = 0
    """Tokens sampled by earlier calls."""
    _counted: int = 0
    """Tokens of all attempts that `new_counts` has returned."""
    _retried: int = 0
    """Tokens of failed attempts before the last one."""
    _call: AgentRollouts | None = None
    """The call that serves it; None while it is paused."""
    _row: int = 0
    """Its first row in that call."""
    _session: Session | None = None
    _trajectory: Trajectory | None = None
    _failure: BaseException | None = None
    """Set if anything but the program has failed."""
    _waiting: list[WaitingRequest] = field(default_factory=list)
    _program: asyncio.Task[None] | None = None
    _admission: asyncio.Task[None] | None = None
    _holds_slot: bool = False
    _clock: PausableTimeout = field(init=False)

    def __post_init__(self) -> None:
        self._clock = PausableTimeout(self.setup.spec.timeout_s)

    # -- calls

    def serve(self, call: AgentRollouts, row: int) -> None:
        """Let `call` answer its requests from now on, as soon as there is a slot."""
        self._call, self._row = call, row
        if self._failure is not None:
            call.broken(self._failure)
        elif self._trajectory is not None:
            call.ended(row, self._trajectory)
        else:
            self._admission = asyncio.get_running_loop().create_task(self._admit())

    def pause(self) -> np.ndarray:
        """Let requests and the clock wait for another call. Returns the tokens that this call has sampled for it."""
        if self._admission is not None:
            self._admission.cancel()
        self._call = None
        self._clock.pause()
        self._release()
        tokens = [np.zeros(0, dtype=np.int64), *(completion.tokens for completion in self._completions())]
        new = np.concatenate(tokens)[self.begun :]
        self.begun += len(new)
        return new

    def new_counts(self) -> dict[str, int]:
        """Counts of the sample's tokens for the account, since the last call of this method."""
        total, begun = self._retried + sum(len(completion.tokens) for completion in self._completions()), self._counted
        self._counted = max(total, begun)
        return {"sampled": self._counted - begun, "begun": begun, "retried": self._retried}

    def cancel(self) -> None:
        for task in (self._admission, self._program):
            if task is not None:
                task.cancel()
        self._release()

    async def end(self) -> None:
        self.cancel()
        if self._program is not None:
            await asyncio.wait([self._program])

    @property
    def oldest(self) -> int | None:
        """Oldest policy version of its tokens; None without tokens."""
        return min(
            (completion.policy_version for completion in self._completions() if len(completion.tokens)), default=None
        )

    def _completions(self) -> list[Completion]:
        """Replies so far, complete ones first."""
        replies = [exchange.reply for exchange in self._session.tree.exchanges] if self._session is not None else []
        return [
            completion
            for completion in (*replies, *(waiting.sampled for waiting in self._waiting))
            if completion is not None
        ]

    async def _admit(self) -> None:
        await self.setup.slots.acquire()
        self._holds_slot, self._admission = True, None
        if self._trajectory is not None or self._failure is not None:
            # The program of a paused agent has gone on, and ended before there was a slot.
            self._release()
            return
        if self._program is None:
            self._program = asyncio.get_running_loop().create_task(self._run())
        self._clock.go_on()
        for waiting in self._waiting:
            self._call_now.ask(waiting)

    def _release(self) -> None:
        if self._holds_slot:
            self._holds_slot = False
            self.setup.slots.release()

    # -- requests

    async def _ask(self, request: GenerationRequest) -> Completion:
        waiting = WaitingRequest(request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._holds_slot:
            self._call_now.ask(waiting)
        try:
            return await waiting.reply
        finally:
            self._waiting.remove(waiting)

    @property
    def _call_now(self) -> AgentRollouts:
        assert self._call is not None, "a paused agent has no slot"
        return self._call

    # -- the program

    async def _run(self) -> None:
        """Run the program, again if it fails and may."""
        try:
            self._trajectory = await self._played()
        except asyncio.CancelledError:
            raise
        except BaseException as failure:  # noqa: BLE001 - raised in the thread that yields
            self._failure = failure
            if self._call is not None:
                self._call.broken(failure)
            return
        self._release()
        if self._call is not None:
            self._call.ended(self._row, self._trajectory)

    async def _played(self) -> Trajectory:
        spec, retries = self.setup.spec, Counter[FailureClass]()
        session, verdict, error = await self._attempt()
        while error is not None and not session.refused and retries[error.failure] < spec.retries_of(error.failure):
            if error.failure != "program":
                # What has failed may need time to recover.
                await asyncio.sleep(min(2.0 ** retries[error.failure], _LONGEST_PAUSE_S))
            retries[error.failure] += 1
            self._retried += session.tree.sampled_tokens()
            session, verdict, error = await self._attempt()
        return Trajectory(session.tree, verdict, error, session.refused, retries.total(), self._clock.seconds)

    async def _attempt(self) -> tuple[Session, ProgramResult, ProgramError | None]:
        """The session, the program's verdict, and the reason if it failed."""
        setup, gateway = self.setup, self.setup.gateway
        session = self._session = self.new_session(self._ask)
        # No row contains the tokens of a failed attempt.
        self.begun = 0
        gateway.add(session)
        try:
            async with self._clock:
                verdict = await setup.program.run(gateway.url, session.key, self.task)
        except TimeoutError:
            message = f"it took longer than timeout_s, {setup.spec.timeout_s:g} s"
            return session, ProgramResult(), ProgramError(message, failure="timeout")
        except ProgramError as error:
            return session, ProgramResult(output=error.output), error
        finally:
            gateway.remove(session)
        if verdict.reward is None and verdict.state is None and setup.needs_reward:
            return session, verdict, ProgramError("it gave no reward, which `fn: agent` takes")
        return session, verdict, None
