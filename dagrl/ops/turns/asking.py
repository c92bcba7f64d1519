"""Asks an engine for one turn after the other, of many responses at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from dagrl.backends.base import Completion, GenerateEngine, GenerationRequest
from dagrl.config.schema import SamplingSpec


@dataclass(frozen=True, slots=True)
class TurnDone:
    """A turn of the response at `row`."""

    row: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call of the engine's has ended."""

    failure: BaseException | None = None


class TurnRequests:
    """Collects requests, and hands them to the engine whenever it is of use. To be used from one thread.

    Where the engine's calls take turns, that is when the last one is over; else at once, and each call has a thread
    that waits for it.
    """

    def __init__(
        self, engine: GenerateEngine, sampling: SamplingSpec, deliver: Callable[[TurnDone | CallEnded], None]
    ) -> None:
        """`deliver` hears what comes of it, from any thread."""
        self._engine, self._sampling, self._deliver = engine, sampling, deliver
        self._under_way = 0
        self._waiting: list[tuple[int, GenerationRequest]] = []
        self._left = False

    @property
    def idle(self) -> bool:
        """Whether the engine has nothing of this to do."""
        return not self._under_way

    def ask(self, row: int, request: GenerationRequest) -> None:
        """Ask for the next turn of the response at `row`, with the next call."""
        self._waiting.append((row, request))

    def hand_over(self) -> None:
        """Begin a call with all that waits, if the engine would not have it wait for another one."""
        if not self._waiting or (self._under_way and self._engine.takes_turns):
            return
        asked, self._waiting = self._waiting, []
        self._under_way += 1
        threading.Thread(target=self._follow, args=(asked,), daemon=True).start()

    def over(self) -> None:
        """Take note of the end of a call."""
        self._under_way -= 1

    def leave(self) -> None:
        """Let calls under way end at their next completion; nobody waits for them."""
        self._left = True

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
            assert self._left or not left, f"the engine has left {len(left)} of {len(asked)} requests unanswered"
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits for the responses
            failure = error
        self._deliver(CallEnded(failure))
