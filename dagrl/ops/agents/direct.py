"""Requests of agents for an engine that passes completions on by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from dagrl.backends.base import Completion, GenerationRequest, StartsGenerating
from dagrl.config.schema import SamplingSpec
from dagrl.ops.response import ABORTED
from dagrl.ops.turns.requests import failure_of


@dataclass(frozen=True, slots=True)
class CallsEnded:
    """All calls have ended, or one of them by an abort, or with a failure."""

    aborted: bool = False
    failure: BaseException | None = None


class DirectRequests:
    """Passes each request to the engine at once, and each completion back. Used on the endpoint's event loop.

    No other thread takes part, whose waking would cost as much as the rest.
    """

    def __init__(
        self,
        engine: StartsGenerating,
        sampling: SamplingSpec,
        loop: asyncio.AbstractEventLoop,
        answer: Callable[[int, Completion], None],
        tell: Callable[[CallsEnded], None],
    ) -> None:
        """`answer` receives completions, on `loop`."""
        self._engine, self._sampling, self._loop = engine, sampling, loop
        self._answer, self._tell = answer, tell
        self._calls: dict[int, Future[None]] = {}
        self._left = False

    @property
    def idle(self) -> bool:
        """Whether no call is running. Thread-safe."""
        return not self._calls

    def ask(self, number: int, request: GenerationRequest) -> None:
        """Sample a reply for the request of this number. Does nothing after `leave`."""
        if self._left:
            return
        sampled: list[Completion] = []

        def ended(call: Future[None]) -> None:
            self._loop.call_soon_threadsafe(self._ended, number, call, sampled)

        try:
            call = self._engine.start_generating([request], self._sampling, sampled.append)
        except Exception as failure:  # noqa: BLE001 - ends the rollout, not the agent
            self._tell(CallsEnded(failure=failure))
            return
        self._calls[number] = call
        call.add_done_callback(ended)

    def leave(self) -> None:
        """End running calls, without waiting for them."""
        self._left = True
        for call in self._calls.values():
            call.cancel()

    def _ended(self, number: int, call: Future[None], sampled: list[Completion]) -> None:
        del self._calls[number]
        failure = failure_of(call)
        for completion in sampled:
            self._answer(number, completion)
        aborted = any(completion.finish_reason == ABORTED for completion in sampled)
        if failure is not None or aborted or self.idle:
            self._tell(CallsEnded(aborted, failure))
