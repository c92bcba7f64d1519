"""Queues turns of many responses for an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from dagrl.backends.base import Completion, GenerateEngine, GenerationRequest, StartsGenerating
from dagrl.config.schema import SamplingSpec


@dataclass(frozen=True, slots=True)
class TurnDone:
    """A completed turn of the response at `row`."""

    row: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call of `generate` has ended."""

    failure: BaseException | None = None


class TurnRequests:
    """Collects requests and passes them to the engine. Not thread-safe.

    If the engine serializes calls, a call starts when the previous one has ended; else at once. A call is followed by
    a thread, unless the engine passes completions on by itself.
    """

    def __init__(
        self, engine: GenerateEngine, sampling: SamplingSpec, deliver: Callable[[TurnDone | CallEnded], None]
    ) -> None:
        """`deliver` receives the results, from any thread."""
        self._engine, self._sampling, self._deliver = engine, sampling, deliver
        self._under_way = 0
        self._waiting: list[tuple[int, GenerationRequest]] = []
        self._left = False
        self._started: list[Future[None]] = []

    @property
    def idle(self) -> bool:
        """Whether no call is running."""
        return not self._under_way

    def ask(self, row: int, request: GenerationRequest) -> None:
        """Add a request for the next turn of the response at `row`."""
        self._waiting.append((row, request))

    def flush(self) -> None:
        """Start a call with all queued requests, unless it would have to wait for another call."""
        if not self._waiting or (self._under_way and self._engine.serializes_calls):
            return
        asked, self._waiting = self._waiting, []
        self._under_way += 1
        if isinstance(self._engine, StartsGenerating):
            self._start(self._engine, asked)
        else:
            threading.Thread(target=self._follow, args=(asked,), daemon=True).start()

    def call_ended(self) -> None:
        """Record the end of a call."""
        self._under_way -= 1

    def leave(self) -> None:
        """End running calls, at the latest at their next completion, without waiting for them."""
        self._left = True
        for call in self._started:
            call.cancel()

    def _start(self, engine: StartsGenerating, asked: Sequence[tuple[int, GenerationRequest]]) -> None:
        def ended(call: Future[None]) -> None:
            self._deliver(CallEnded(failure_of(call)))

        call = engine.start_generating(
            [request for _, request in asked],
            self._sampling,
            lambda completion: self._deliver(TurnDone(asked[completion.index][0], completion)),
        )
        self._started = [*(each for each in self._started if not each.done()), call]
        call.add_done_callback(ended)

    def _follow(self, asked: list[tuple[int, GenerationRequest]]) -> None:
        failure: BaseException | None = None
        left = {row for row, _ in asked}
        try:
            for completion in self._engine.generate([request for _, request in asked], self._sampling):
                if self._left:
                    break
                row = asked[completion.index][0]
                left.remove(row)
                self._deliver(TurnDone(row, completion))
            assert self._left or not left, f"the engine did not answer {len(left)} of {len(asked)} requests"
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for the responses
            failure = error
        self._deliver(CallEnded(failure))


def failure_of(call: Future[None]) -> BaseException | None:
    """The exception with which a call that is done has ended; None if it has not failed."""
    return CancelledError() if call.cancelled() else call.exception()
