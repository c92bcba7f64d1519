"""Agents' functions run apart from the worker, which outlives them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dagrl.ops.agents.function_processes import FunctionProcesses
from dagrl.ops.agents.results import ProgramError, ProgramResult
from dagrl.plugins.agent import NamedAgent

FUNCTIONS = """
import asyncio, os, time
from pathlib import Path

async def solve(client, row, *, factor):
    return {"reward": factor * row["value"], "process": os.getpid(), "own": client.api_key == row["key"]}

async def acts(client, row):
    match row["act"]:
        case "fail":
            raise RuntimeError("no idea")
        case "cancel":
            lookup = asyncio.create_task(asyncio.sleep(100))
            await asyncio.sleep(0)
            lookup.cancel()
            await lookup
        case "grow":
            return 10**400
        case "exit":
            os._exit(3)
        case "block":
            time.sleep(3)
        case "wait":
            try:
                Path(row["file"]).touch()
                await asyncio.sleep(100)
            finally:
                Path(row["file"]).unlink()
    return 1.0
"""
ENVIRONMENT = """
import asyncio, os, sys
from dagrl.environments.contract import Unscored
from dagrl.environments.failures import EnvironmentFailedError

class Sums:
    def __init__(self, *, most=3, log=None):
        if most < 1:
            raise ValueError("`most` must be at least 1")
        self.most, self.log = most, log

    async def solve(self, client, row):
        match row.get("act"):
            case "fail":
                raise EnvironmentFailedError("network", "the server is away")
            case "exit":
                os._exit(3)
            case "plain":
                bare = not hasattr(client, "chat") and "pydantic" not in sys.modules
                return {"reward": 1.0, "bare": bare, "own": (client.base_url, client.api_key) == ("http://x/v1", "k")}
        return Unscored({"value": row["value"], "secret": object()})

    async def score(self, states):
        values = [state["value"] for state in states]
        return [{"reward": float(value == max(values)), "process": os.getpid()} for value in values]

    def rows(self):
        print("noise on standard output")
        for number in range(self.most):
            prompt = [{"role": "user", "content": f"{number}+1="}]
            yield {"prompt": prompt, "answer": str(number + 1), "data_source": "sums", "extra_info": {"number": number}}

    async def close(self):
        with open(self.log, "a") as log:
            print("closed", file=log)
"""
LIMIT_S = 60.0


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., FunctionProcesses]]:
    """Makes programs of the functions above."""
    (tmp_path / "functions_of_agents.py").write_text(FUNCTIONS)
    programs = []

    def start(name: str, **args: Any) -> FunctionProcesses:
        programs.append(FunctionProcesses(NamedAgent(f"functions_of_agents:{name}", None, args, str(tmp_path))))
        return programs[-1]

    yield start
    for program in programs:
        program.close()


def run(*steps: Any) -> list[Any]:
    """Await all at once; errors are results."""

    async def together() -> list[Any]:
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*(step() for step in steps), return_exceptions=True)

    return asyncio.run(together())


def test_a_function_gets_its_row_and_a_client_in_another_process(started) -> None:
    program = started("solve", factor=2)
    rows = [{"value": value, "key": f"key {value}"} for value in range(5)]
    found = run(*(lambda row=row: program.run("http://127.0.0.1:1/v1", row["key"], row) for row in rows))
    assert [verdict.reward for verdict in found] == [0, 2, 4, 6, 8]
    assert all(verdict.metrics["own"] == 1 and verdict.metrics["process"] != os.getpid() for verdict in found)


def test_failures_are_those_of_a_run(started) -> None:
    program = started("acts")
    failed, fine = run(*(lambda act=act: program.run("http://x/v1", "k", {"act": act}) for act in ("fail", "pass")))
    assert fine == ProgramResult(1.0)
    assert isinstance(failed, ProgramError)
    assert "it raised RuntimeError: no idea (" in str(failed) and "functions_of_agents.py:" in str(failed)


def test_neither_a_cancelled_task_nor_a_huge_number_is_waited_for(started) -> None:
    program = started("acts")
    acts = ("cancel", "grow")
    cancelled, huge = run(*(lambda act=act: program.run("http://x/v1", "k", {"act": act}) for act in acts))
    assert isinstance(cancelled, ProgramError) and "it raised CancelledError" in str(cancelled)
    assert isinstance(huge, ProgramError) and "return a number" in str(huge)


def test_a_process_that_dies_fails_its_runs_and_is_started_again(started) -> None:
    program = started("acts")

    async def both() -> None:
        with pytest.raises(ProgramError, match="the process of its function ended with exit code 3"):
            await program.run("http://x/v1", "k", {"act": "exit"})
        assert await program.run("http://x/v1", "k", {"act": "pass"}) == ProgramResult(1.0)

    assert run(both) == [None]


def test_a_function_that_blocks_holds_up_no_one_else(started) -> None:
    program = started("acts")

    async def both() -> None:
        await program.run("http://x/v1", "k", {"act": "pass"})
        blocked = asyncio.create_task(program.run("http://x/v1", "k", {"act": "block"}))
        begun, longest = time.monotonic(), 0.0
        while not blocked.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)
        assert time.monotonic() - begun > 2 and longest < 2

    assert run(both) == [None]


def test_a_run_that_is_cancelled_ends(started, tmp_path: Path) -> None:
    program, file = started("acts"), tmp_path / "waits"

    async def until(there: bool) -> None:
        while file.exists() != there:
            await asyncio.sleep(0.01)

    async def cancelled() -> None:
        task = asyncio.create_task(program.run("http://x/v1", "k", {"act": "wait", "file": str(file)}))
        await until(True)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(False)

    assert run(cancelled) == [None]


@pytest.fixture
def environment(tmp_path: Path, bare_python: Path) -> Iterator[Callable[..., FunctionProcesses]]:
    (tmp_path / "sums.py").write_text(ENVIRONMENT)
    programs = []

    def start(**args: Any) -> FunctionProcesses:
        programs.append(FunctionProcesses(NamedAgent(None, "sums:Sums", args, str(tmp_path)), bare_python))
        programs[-1].start()
        return programs[-1]

    yield start
    for program in programs:
        program.close()


def test_an_environment_runs_in_a_python_without_packages(environment, tmp_path: Path) -> None:
    program = environment(log=str(tmp_path / "log"))
    row = {"act": "plain", "group_id": 0}
    fine, failed = run(
        lambda: program.run("http://x/v1", "k", row),
        lambda: program.run("http://x/v1", "k", {**row, "act": "fail"}),
    )
    assert fine == ProgramResult(1.0, {"bare": 1.0, "own": 1.0})
    assert isinstance(failed, ProgramError) and failed.failure == "network" and "the server is away" in str(failed)
    program.close()
    assert (tmp_path / "log").read_text() == "closed\n"


def test_a_group_is_scored_where_its_states_are(environment, tmp_path: Path) -> None:
    program = environment(log=str(tmp_path / "log"))

    async def group(number: int) -> list[ProgramResult]:
        rows = [{"value": value, "group_id": number} for value in (1, 5, 3)]
        ended = [await program.run("http://x/v1", "k", row) for row in rows]
        return await program.score([result.state for result in ended])

    for results in run(*(lambda number=number: group(number) for number in range(5))):
        assert [result.reward for result in results] == [0, 1, 0]

    async def dies() -> None:
        state = (await program.run("http://x/v1", "k", {"value": 1, "group_id": 0})).state
        with pytest.raises(ProgramError, match="exit code 3"):
            await program.run("http://x/v1", "k", {"act": "exit", "group_id": 0})
        with pytest.raises(ProgramError, match="exit code 3"):
            await program.score([state])
        assert (await program.run("http://x/v1", "k", {"value": 1, "group_id": 0})).state is not None

    assert run(dies) == [None]


def test_an_environment_that_cannot_be_made_is_refused_at_the_start(environment) -> None:
    with pytest.raises(ValueError, match="`sums:Sums` cannot be made: `most` must be at least 1"):
        environment(most=0)
    with pytest.raises(ValueError, match="'least'"):
        environment(least=1)
