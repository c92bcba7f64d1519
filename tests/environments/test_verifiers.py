"""Environments of verifiers, in a Python that has it: their numbers are those of its own evaluation command."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from verifiers_tasks import ADDING, LOOP, PYTHON

from dagrl.ops.agents.function_processes import FunctionProcesses
from dagrl.ops.agents.results import ProgramError, ProgramResult
from dagrl.plugins.agent import NamedAgent
from dagrl.plugins.agent_python import problem_in

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="`make verifiers` builds .agents/verifiers")
LIMIT_S = 240.0


class Model(BaseHTTPRequestHandler):
    """A model that adds, except to 2, or writes the sum to a file if it has tools."""

    asked: ClassVar[dict[str, list[str]]] = {}
    """Key -> messages of its requests."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers["Authorization"].removeprefix("Bearer ")
        self.asked.setdefault(key, []).append(json.dumps(body["messages"]))
        question = next(message for message in body["messages"] if message["role"] == "user")["content"]
        left = int(question.partition("+")[0])
        said = str(left + 1 + (left == 2)) + "!" * len(body["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if body.get("tools") and body["messages"][-1]["role"] == "user":
            command = json.dumps({"command": f"echo {said.rstrip('!')} > answer.txt"})
            function = {"name": "bash", "arguments": command}
            message = {"role": "assistant", "content": None}
            message["tool_calls"] = [{"index": 0, "id": "call_1", "type": "function", "function": function}]
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        head = {"id": "c", "created": 1, "model": "policy"}
        if body.get("stream"):
            chunks = [(message, None), ({}, reason)]
            parts = [{"index": 0, "delta": delta, "finish_reason": end} for delta, end in chunks]
            lines = [json.dumps({**head, "object": "chat.completion.chunk", "choices": [part]}) for part in parts]
            self._send("text/event-stream", "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]))
        else:
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            choice = {"index": 0, "message": message, "finish_reason": reason}
            whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
            self._send("application/json", json.dumps(whole))

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Model.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adding.py").write_text(ADDING)
    return tmp_path


def solved(folder: Path, args: dict[str, Any], samples: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """The results of the episodes of tasks, each at an address; errors are results."""
    program = FunctionProcesses(NamedAgent(None, "verifiers", args, str(folder)), PYTHON)

    async def together() -> list[Any]:
        async with asyncio.timeout(LIMIT_S):
            rows = [{"extra_info": {"task": json.dumps(task)}} for _, task in samples]
            runs = [
                program.run(url, f"key-{number}", row)
                for number, ((url, _), row) in enumerate(zip(samples, rows, strict=True))
            ]
            return await asyncio.gather(*runs, return_exceptions=True)

    try:
        program.start()
        return asyncio.run(together())
    finally:
        program.close()


def test_its_numbers_are_those_of_its_evaluation_command(folder, url) -> None:
    args = {"taskset": {"id": "adding", "most": 4}, "agent": LOOP}
    tasks = [{"idx": left, "prompt": f"{left}+1=", "answer": str(left + 1)} for left in range(4)]
    failing = [(url, {**tasks[0], "name": "broken"}), ("http://127.0.0.1:9/v1", tasks[1])]
    *results, broken, unreachable = solved(folder, args, [*((url, task) for task in tasks), *failing])
    assert isinstance(broken, ProgramError) and broken.failure == "grader" and "no scores" in str(broken)
    assert isinstance(unreachable, ProgramError) and unreachable.failure == "network"
    # Each sample has its own key.
    assert set(Model.asked) == {f"key-{number}" for number in range(5)}
    ours = sorted(message for number in range(4) for message in Model.asked[f"key-{number}"])
    config = {"env": args, "model": "policy", "client": {"base_url": url, "api_key_var": "ANY"}, "push": False}
    (folder / "eval.json").write_text(json.dumps({**config, "run": {"name": "own"}}))
    command = [PYTHON.parent / "vf-eval", "@", "eval.json", "--no-rich", "-o", "out"]
    variables = os.environ | {"PYTHONPATH": str(folder), "ANY": "key"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    traces = [json.loads(line)["traces"][0] for line in (folder / "out/own/traces.jsonl").read_text().splitlines()]
    traces.sort(key=lambda trace: trace["task"]["data"]["idx"])
    for result, trace in zip(results, traces, strict=True):
        reward = trace["rewards"]["right"]
        metrics = {"right": reward["score"], **trace["metrics"]}
        assert result == ProgramResult(reward["score"] * reward["weight"], metrics)
    assert [result.reward for result in results] == [0.5, 0.5, 0.0, 0.5]
    assert ours == sorted(Model.asked["key"])


def test_its_harness_calls_tools_in_a_sandbox(folder, url) -> None:
    agent = {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}
    task = {"prompt": "3+1=", "answer": "4", "name": "file"}
    (result,) = solved(folder, {"taskset": {"id": "adding"}, "agent": agent}, [(url, task)])
    assert result == ProgramResult(0.5, {"right": 1.0, "length": 5.0}) and len(Model.asked["key-0"]) == 2


def test_wrong_arguments_are_refused_at_the_start(folder) -> None:
    args = {"taskset": {"id": "adding", "least": 1}}
    assert problem_in(PYTHON, NamedAgent(None, "verifiers", args, str(folder))) is None
    with pytest.raises(ValueError, match=r"cannot be made: taskset\.least"):
        solved(folder, args, [])
