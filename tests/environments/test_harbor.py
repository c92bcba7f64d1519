"""Harbor's own package runs its tasks, without containers: its agents, its verifier, and its failures."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from harbor_tasks import AGENT, CHECK, write_task

from dagrl.ops.agents.function_processes import FunctionProcesses
from dagrl.ops.agents.results import ProgramError
from dagrl.plugins.agent import NamedAgent

pytestmark = pytest.mark.skipif(
    shutil.which("tmux") is None or subprocess.run(["unshare", "-Urpmf", "true"], check=False).returncode != 0,
    reason="needs tmux and user namespaces",
)
PYTHON = Path(__file__).parents[2] / ".agents" / "harbor" / "bin" / "python"
TERMINUS = {
    "name": "terminus-2",
    "kwargs": {"max_turns": 3, "record_terminal_session": False, "enable_summarize": False},
}


class Policy(BaseHTTPRequestHandler):
    """An endpoint that types commands into the terminal, and then says that the task is complete."""

    protocol_version = "HTTP/1.1"
    keys = "cat numbers.txt; env >env.txt; echo 42 >answer.txt\n"
    status = 200
    waits: threading.Event | None = None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Authorization"] == "Bearer secret-key"
        if self.waits is not None:
            self.waits.wait(60)
        done = len(body["messages"]) > 1
        commands = [] if done else [{"keystrokes": self.keys, "duration": 0.5}]
        said = json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": done})
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        error = {"error": {"message": "it is over", "code": "context_length_exceeded", "type": "invalid_request_error"}}
        answer: dict[str, Any] = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
        data = json.dumps(error if self.status != 200 else answer | {"choices": [choice]}).encode()
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(**changed: Any) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Changed", (Policy,), changed))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()


@pytest.fixture
def harbor(tmp_path: Path, monkeypatch) -> Iterator[Callable[..., FunctionProcesses]]:
    """Makes the processes of a Harbor environment, in a folder that must be empty of trials at the end."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "adder.py").write_text(AGENT)
    made = []

    def make(**args: Any) -> FunctionProcesses:
        args = {"tasks": str(tmp_path / "tasks"), "environment": "local"} | args
        made.append(FunctionProcesses(NamedAgent(None, "harbor", args, str(tmp_path)), PYTHON))
        made[-1].start()
        return made[-1]

    yield make
    for processes in made:
        processes.close()
    assert trials(tmp_path) == []


def trials(folder: Path) -> list[Path]:
    return [*(folder / "tmp").glob("dagrl-harbor-*")]


async def outcome(processes: FunctionProcesses, task: str, url: str = "http://127.0.0.1:1/v1") -> Any:
    """Reward and metrics of an episode, or its failure."""
    row = {"messages": [], "extra_info": {"task": {"path": task}}, "sample_id": 0, "group_id": 0, "seed": 0}
    try:
        result = await processes.run(url, "secret-key", row)
    except ProgramError as error:
        return error.failure, str(error)
    return result.reward, dict(result.metrics)


def test_its_oracle_solves_a_task_and_the_verifiers_numbers_are_metrics(tmp_path, harbor) -> None:
    write_task(tmp_path / "tasks" / "sum")
    numbers = """echo '{"reward": 0.5, "lines": 1}' >/logs/verifier/reward.json; touch /usr/no 2>/dev/null && exit 1"""
    write_task(tmp_path / "tasks" / "numbers", numbers)
    processes = harbor(agent="oracle")
    assert asyncio.run(outcome(processes, "sum")) == (1.0, {})
    assert asyncio.run(outcome(processes, "numbers")) == (0.5, {"lines": 1.0})


def test_terminus_2_solves_a_task_by_the_samples_endpoint_and_does_not_show_its_key(tmp_path, harbor) -> None:
    write_task(tmp_path / "tasks" / "sum", f"grep -q secret /app/env.txt && exit 1; {CHECK}")
    with served() as url:
        assert asyncio.run(outcome(harbor(agent=TERMINUS), "sum", url)) == (1.0, {})


def test_failures_have_their_class_and_limits_of_the_policy_a_reward(tmp_path, harbor) -> None:
    tasks = tmp_path / "tasks"
    write_task(tasks / "sum")
    write_task(tasks / "unhealthy", more='healthcheck = {command = "false", retries = 1, interval_sec = 0.1}')
    write_task(tasks / "silent", "true")
    write_task(tasks / "endless", "sleep 60", verifier_s=1)
    write_task(tasks / "short", agent_s=1)

    async def outcomes() -> dict[str, Any]:
        terminus, broken = harbor(agent=TERMINUS), harbor(agent="adder:Broken")
        with served(status=401) as closed, served(status=400) as full, served(waits=threading.Event()) as slow:
            runs = {
                "unhealthy": outcome(terminus, "unhealthy"),
                "silent": outcome(terminus, "silent", full),
                "endless": outcome(terminus, "endless", full),
                "broken": outcome(broken, "sum"),
                "closed": outcome(terminus, "sum", closed),
                "full": outcome(terminus, "sum", full),
                "slow": outcome(terminus, "short", slow),
            }
            return dict(zip(runs, await asyncio.gather(*runs.values()), strict=True))

    found = asyncio.run(outcomes())
    classes = {name: result[0] for name, result in found.items()}
    assert classes == {
        "unhealthy": "start",
        "silent": "grader",
        "endless": "grader",
        "broken": "exec",
        "closed": "network",
        "full": 0.0,
        "slow": 0.0,
    }, found
    assert "RuntimeError: no such device" in found["broken"][1]


def test_nothing_is_left_of_trials_that_are_cancelled_or_killed(tmp_path, harbor) -> None:
    write_task(tmp_path / "tasks" / "sum")
    sleep = f"sleep {10_000_000 + os.getpid()}"

    async def end_early() -> None:
        processes = harbor(agent=TERMINUS)
        with served(keys=f"{sleep} & {sleep}\n") as url:
            episode = asyncio.create_task(outcome(processes, "sum", url))
            await until(lambda: len(running(sleep)) >= 2)
            episode.cancel()
            await until(lambda: running(sleep) == [] and trials(tmp_path) == [])
            episode = asyncio.create_task(outcome(processes, "sum", url))
            await until(lambda: len(running(sleep)) >= 2)
            os.kill(host_of(processes), signal.SIGKILL)
            assert (await episode)[0] == "program"
            await until(lambda: running(sleep) == [])

    asyncio.run(end_early())
    for folder in trials(tmp_path):
        shutil.rmtree(folder)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.05)


def running(command: str) -> list[str]:
    """Processes whose command line is `command`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "cmdline").read_text().replace("\0", " ").strip() == command:
                found.append(entry.name)
    return found


def host_of(processes: FunctionProcesses) -> int:
    """The process in which the environment runs."""
    (process,) = [each for each in processes._processes if each is not None]
    return process._process.pid


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"agent": {"name": "oracle", "turns": 3}}, "agent: Harbor has no field turns"),
        ({"environment": "e2b"}, "E2B_API_KEY"),
    ],
)
def test_wrong_arguments_are_found_before_the_first_episode(tmp_path, harbor, args, said) -> None:
    write_task(tmp_path / "tasks" / "sum")
    with pytest.raises(ValueError, match=said):
        harbor(**args)
