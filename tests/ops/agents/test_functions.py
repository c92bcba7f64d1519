"""Functions: a task that they cancel is their failure, and not the end of the run."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from dagrl.ops.agents.functions import FunctionProgram
from dagrl.ops.agents.results import ProgramError, ProgramResult

LIMIT_S = 20.0


async def awaits_a_cancelled_task(*_: Any) -> list[float]:
    task = asyncio.create_task(asyncio.sleep(100))
    await asyncio.sleep(0)
    task.cancel()
    await task
    return [1.0]


def test_a_cancelled_task_of_a_function_is_its_failure() -> None:
    program = FunctionProgram(awaits_a_cancelled_task, {}, awaits_a_cancelled_task)

    async def both() -> None:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(ProgramError, match="it raised CancelledError"):
                await program.run("http://x/v1", "k", {})
            with pytest.raises(ProgramError, match="scoring its group raised CancelledError"):
                await program.score([None])

    asyncio.run(both())


def test_a_run_that_is_cancelled_is_no_failure() -> None:
    begun, ended = threading.Event(), []

    async def waits(client: Any, row: Any) -> ProgramResult:
        begun.set()
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError as error:
            ended.append(error)
            raise
        return ProgramResult()

    async def cancelled() -> None:
        task = asyncio.create_task(FunctionProgram(waits, {}).run("http://x/v1", "k", {}))
        async with asyncio.timeout(LIMIT_S):
            while not begun.is_set():
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while not ended:
                await asyncio.sleep(0.01)

    asyncio.run(cancelled())


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), RuntimeError("x" * 5_000_000)])
@pytest.mark.parametrize("where", ["run", "score"])
def test_a_function_that_would_end_the_loop_fails_alone(raised: BaseException, where: str) -> None:
    calls = [raised]

    async def solve(client: Any, row: Any) -> float:
        if where == "run" and calls:
            raise calls.pop()
        return 1.0

    async def score(states: Any) -> list[float]:
        if where == "score" and calls:
            raise calls.pop()
        return [1.0]

    program = FunctionProgram(solve, {}, score)

    def ask() -> Any:
        asked = program.run("http://127.0.0.1:1/v1", "key", {}) if where == "run" else program.score([None])
        return asyncio.run(asyncio.wait_for(asked, 20))

    with pytest.raises(ProgramError) as caught:
        ask()
    assert len(str(caught.value)) < 5000
    assert ask() in (ProgramResult(1.0), [ProgramResult(1.0)])
