"""Agents' functions get a sandbox for each episode, and leave none behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dagrl.config.schema import AgentSpec
from dagrl.ops.agents.function_processes import FunctionProcesses
from dagrl.ops.agents.results import ProgramError
from dagrl.ops.agents.setup import load_program
from dagrl.plugins.agent import NamedAgent
from dagrl.plugins.agent_python import problem_in
from tests.helpers.sandbox_processes import processes_of

LIMIT_S = 60.0
AGENTS = """
import asyncio, os

async def solve(client, row, *, sandbox):
    await sandbox.write("code.py", row["code"])
    done = await sandbox.exec("python3 code.py; ls | wc -l", timeout_s=20)
    first, files = done.stdout.split()
    return {"reward": float(first == row["answer"]), "files": int(files), "process": os.getpid()}

async def waits(client, row, *, sandbox):
    await sandbox.exec("sleep 1000", timeout_s=1000)

class Tasks:
    async def solve(self, client, row, sandbox):
        return float((await sandbox.exec(["cat"], stdin=row["code"])).stdout == row["code"])

class Broken:
    def __init__(self, label):
        pass

    async def sweep(self):
        return 0

    async def start(self, request):
        raise OSError("the machine is on fire")

    async def close(self):
        pass
"""
HOLDER = """
import asyncio, sys
from pathlib import Path
from dagrl.config.schema import AgentSpec
from dagrl.ops.agents.setup import load_program

async def main(folder, label):
    program = load_program(AgentSpec(function="agents_with_sandbox:waits", sandbox={"warm": 3}), Path(folder), label)
    program.start()
    await program.run("http://127.0.0.1:1/v1", "key", {})

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., FunctionProcesses]]:
    (tmp_path / "agents_with_sandbox.py").write_text(AGENTS)
    programs: list[FunctionProcesses] = []

    def start(label: str | None = None, **options: Any) -> FunctionProcesses:
        program = load_program(AgentSpec(**options), tmp_path, label)
        assert isinstance(program, FunctionProcesses)
        programs.append(program)
        program.start()
        return program

    yield start
    for program in programs:
        program.close()


async def all_of(program: FunctionProcesses, *rows: dict[str, Any]) -> list[Any]:
    async with asyncio.timeout(LIMIT_S):
        runs = [program.run("http://127.0.0.1:1/v1", "key", {"group_id": 0, **row}) for row in rows]
        return await asyncio.gather(*runs, return_exceptions=True)


def test_each_episode_has_an_empty_sandbox_of_its_own(started) -> None:
    program = started("own-sandbox", function="agents_with_sandbox:solve", sandbox={"warm": 2, "starting": 4})
    results = asyncio.run(
        all_of(program, *({"code": f"print({each} * 2)", "answer": str(each * 2)} for each in range(8)))
    )
    assert [result.reward for result in results] == [1.0] * 8
    assert {result.metrics["files"] for result in results} == {1}
    program.close()
    assert _left("own-sandbox") == []


def test_a_function_in_another_python_has_one_too(started, bare_python: Path) -> None:
    program = started(environment="agents_with_sandbox:Tasks", sandbox=True, python=bare_python)
    assert [result.reward for result in asyncio.run(all_of(program, {"code": "x = 1"}))] == [1.0]


def test_a_python_without_the_client_of_the_provider_is_refused(tmp_path: Path, bare_python: Path) -> None:
    (tmp_path / "agents_with_sandbox.py").write_text(AGENTS)
    spec = AgentSpec(function="agents_with_sandbox:solve", sandbox={"provider": "docker", "image": "busybox"})
    problem = problem_in(bare_python, NamedAgent.of(spec, tmp_path))
    assert problem is not None
    assert problem[0] == "sandbox"
    assert "aiodocker" in problem[1]


def test_a_sandbox_that_does_not_start_is_a_failure_of_a_machine(started) -> None:
    program = started(function="agents_with_sandbox:solve", sandbox={"provider": "agents_with_sandbox:Broken"})
    (error,) = asyncio.run(all_of(program, {}))
    assert isinstance(error, ProgramError)
    assert "on fire" in str(error)
    assert error.failure == "start"


def test_a_worker_that_is_killed_leaves_no_sandbox(started, tmp_path: Path) -> None:
    program = started(function="agents_with_sandbox:solve", sandbox=True)
    label = f"killed-{os.getpid()}"
    worker = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), label])
    end = time.monotonic() + LIMIT_S
    while len(processes_of(label)) < 5:  # four sandboxes and a command
        assert worker.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert _left(label) == []
    program.close()


def _left(label: str) -> list[int]:
    """Processes of the label's sandboxes that do not end."""
    end = time.monotonic() + LIMIT_S
    while (found := processes_of(label)) and time.monotonic() < end:
        time.sleep(0.1)
    with suppress(FileNotFoundError):
        assert [*Path(os.environ.get("TMPDIR", "/tmp")).glob(f"dagrl-sandboxes-*/{label}*/*")] == []
    return found
