"""A limit counts the time between its pauses, whichever of them are within it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from dagrl.ops.agents.running import PausableTimeout

LIMIT_S, PAUSE_S = 100.0, 1000.0
SLACK_S = 50.0
"""More than a test takes."""


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be set forward."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


type Run = Callable[[Callable[[Callable[[float], None]], Awaitable[None]]], None]


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs a function that gets one which lets seconds pass."""
    loop = SkippingLoop()

    def passes(seconds: float) -> None:
        loop.skipped_s += seconds

    yield lambda body: loop.run_until_complete(body(passes))
    loop.close()


async def waits() -> None:
    """Give a limit that has passed the time to end its context."""
    await asyncio.sleep(0.05)


def test_a_pause_does_not_count(run: Run) -> None:
    async def body(passes: Callable[[float], None]) -> None:
        clock = PausableTimeout(LIMIT_S)
        async with clock:
            passes(LIMIT_S - SLACK_S)
            await waits()
            clock.pause()
            passes(PAUSE_S)
            await waits()
            clock.go_on()
            await waits()
        assert LIMIT_S - SLACK_S <= clock.seconds < LIMIT_S

    run(body)


def test_the_time_before_a_pause_counts(run: Run) -> None:
    async def body(passes: Callable[[float], None]) -> None:
        clock = PausableTimeout(LIMIT_S)
        with pytest.raises(TimeoutError):
            async with clock:
                passes(LIMIT_S - SLACK_S)
                clock.pause()
                passes(PAUSE_S)
                clock.go_on()
                passes(SLACK_S)
                await waits()
        assert LIMIT_S <= clock.seconds < PAUSE_S

    run(body)


def test_a_context_that_is_entered_during_a_pause_has_the_whole_limit_after_it(run: Run) -> None:
    async def body(passes: Callable[[float], None]) -> None:
        clock = PausableTimeout(LIMIT_S)
        clock.pause()
        with pytest.raises(TimeoutError):
            async with clock:
                passes(PAUSE_S)
                await waits()
                clock.go_on()
                passes(LIMIT_S - SLACK_S)
                await waits()
                passes(SLACK_S)
                await waits()
        assert LIMIT_S <= clock.seconds < PAUSE_S

    run(body)


def test_each_context_has_the_whole_limit(run: Run) -> None:
    async def body(passes: Callable[[float], None]) -> None:
        clock = PausableTimeout(LIMIT_S)
        for _ in range(2):
            async with clock:
                passes(LIMIT_S - SLACK_S)
                await waits()
        assert clock.seconds >= 2 * (LIMIT_S - SLACK_S)

    run(body)
