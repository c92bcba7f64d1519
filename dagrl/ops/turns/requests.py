"""Queues requests of many responses for an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from dagrl.backends.base import Completion, GenerateEngine, GenerationRequest, StartsGenerating
from dagrl.config.schema import SamplingSpec


@dataclass(frozen=True, slots=True)
class RequestCompleted:
    """The completion of the request with this number."""

    number: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call of `generate` has ended."""

    failure: BaseException | None = None


class RequestQueue:
    """Collects requests and passes them to the engine. Used by one thread.

    If the engine serializes calls, a call starts when the previous one has ended; else at once. A thread waits for each
    call, unless the engine delivers completions by itself.
    """

    def __init__(self, engine: GenerateEngine, sampling: SamplingSpec, deliver: Callable[..., None]) -> None:
        """`deliver` is called with one or more of `RequestCompleted` and `CallEnded`, from any thread."""
        self._engine, self._sampling, self._deliver = engine, sampling, deliver
        self._running = 0
        self._waiting: list[tuple[int, GenerationRequest]] = []
        self._left = False
        self._starts = engine if isinstance(engine, StartsGenerating) else None
        self._calls: set[Future[None]] = set()
        """Calls that the engine has started and not ended."""

    @property
    def idle(self) -> bool:
        """Whether no call is running. Thread-safe."""
        return not self._running

    def ask(self, number: int, request: GenerationRequest) -> None:
        self._waiting.append((number, request))

    def flush(self) -> None:
        """Start a call with all queued requests, unless it would have to wait for another call. Must not follow
        `leave`.
        """
        if not self._waiting or self._left or (self._running and self._engine.serializes_calls):
            return
        asked, self._waiting = self._waiting, []
        self._running += 1
        if self._starts is not None:
            self._start(self._starts, asked)
        else:
            threading.Thread(target=self._wait_for, args=(asked,), daemon=True).start()

    def call_ended(self) -> None:
        self._running -= 1

    def leave(self) -> None:
        """End running calls, at the latest at their next completion, without waiting for them."""
        self._left = True
        for call in tuple(self._calls):
            call.cancel()

    def _start(self, engine: StartsGenerating, asked: Sequence[tuple[int, GenerationRequest]]) -> None:
        completed: list[RequestCompleted] = []

        def take(completion: Completion) -> None:
            completed.append(RequestCompleted(asked[completion.index][0], completion))
            # The only completion of a call is sent with its end, which wakes the other thread once.
            if len(asked) > 1:
                self._deliver(completed.pop())

        def ended(call: Future[None]) -> None:
            self._calls.discard(call)
            self._deliver(*completed, CallEnded(CancelledError() if call.cancelled() else call.exception()))

        try:
            call = engine.start_generating([request for _, request in asked], self._sampling, take)
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits for the responses
            self._deliver(CallEnded(error))
            return
        self._calls.add(call)
        call.add_done_callback(ended)

    def _wait_for(self, asked: list[tuple[int, GenerationRequest]]) -> None:
        failure: BaseException | None = None
        left = {number for number, _ in asked}
        try:
            for completion in self._engine.generate([request for _, request in asked], self._sampling):
                if self._left:
                    break
                number = asked[completion.index][0]
                left.remove(number)
                self._deliver(RequestCompleted(number, completion))
            assert self._left or not left, f"the engine did not answer {len(left)} of {len(asked)} requests"
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for the responses
            failure = error
        self._deliver(CallEnded(failure))


type GroupKey = tuple[int, int]
"""A step and one of its groups."""


class PausedGroups[Kept]:
    """Unfinished groups with the state that continues their samples."""

    def __init__(self, release: Callable[[Kept], None]) -> None:
        """`release` ends state that no later step continues."""
        self._groups: dict[GroupKey, list[Kept]] = {}
        self._release = release

    def put(self, key: GroupKey, kept: Sequence[Kept]) -> None:
        self._groups[key] = [*kept]

    def take(self, key: GroupKey | None) -> list[Kept]:
        """Remove and return a group; empty if it is not stored, for example after a worker's end."""
        return self._groups.pop(key, []) if key is not None else []

    def release_before(self, step: int) -> None:
        for key in [key for key in tuple(self._groups) if key[0] < step]:
            for kept in self.take(key):
                self._release(kept)

    def all(self) -> list[Kept]:
        return [kept for group in self._groups.values() for kept in group]
