"""Servers of environments that answer with anything, at any pace: episodes end in bounded time, with their class."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType, web
from scripted_policy import Policy, session_of

from dagrl.ops.agents.function_processes import FunctionProcesses
from dagrl.ops.agents.gateway import Gateway
from dagrl.ops.agents.results import ProgramError, ProgramResult
from dagrl.plugins.agent import NamedAgent

PYTHON = Path(__file__).parents[2] / ".agents" / "gym" / "bin" / "python"
LIMIT_S, TURNS = 60.0, 6
TASK = {"responses_create_params": {"input": "3+4="}}
ROW = {"messages": [{"role": "user", "content": "3+4="}], "extra_info": {"nemo_gym": json.dumps(TASK)}, "seed": 1}
CASES = {
    "huge": "network",
    "compressed": "network",
    "slow": "timeout",
    "trickling": "timeout",
    "no JSON": "network",
    "a list": "network",
    "nested": "network",
    "no reward": "network|grader",
    "an error": "network|exec",
    "closed": "network",
}


class Server:
    """Both protocols. Answers as `case` says, when the policy has acted."""

    def __init__(self) -> None:
        self.case = ""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(LIMIT_S)

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_get("/schema", self.schema)
        app.router.add_get("/ws", self.openenv)
        app.router.add_get("/openapi.json", self.openapi)
        app.router.add_post("/reset", self.reset)
        app.router.add_post("/step", self.step)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def schema(self, request: web.Request) -> web.Response:
        return web.json_response({"action": {"properties": {"message": {"type": "string"}, "metadata": {}}}})

    async def openapi(self, request: web.Request) -> web.Response:
        return web.json_response({"paths": {"/reset": {}, "/step": {}}})

    async def reset(self, request: web.Request) -> web.Response:
        return web.json_response({"observation": "3+4="})

    async def step(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        match self.case:
            case "compressed":
                answer.headers["Content-Encoding"] = "gzip"
            case "an error":
                answer.set_status(500)
            case "closed":
                assert request.transport is not None
                request.transport.abort()
        await answer.prepare(request)
        if self.case in ("huge", "trickling"):
            while True:
                await answer.write(b" " * (1 << 20 if self.case == "huge" else 1))
                await asyncio.sleep(0 if self.case == "huge" else 0.05)
        await answer.write((await self._text({"observation": "3+4=", "reward": 0.5, "terminated": False})).encode())
        return answer

    async def openenv(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(compress=self.case == "compressed")
        await socket.prepare(request)
        async for message in socket:
            if message.type != WSMsgType.TEXT or message.json()["type"] == "close":
                break
            step: dict[str, Any] = {"observation": {"text": "3+4="}, "reward": None, "done": False}
            if message.json()["type"] == "reset":
                await socket.send_json({"type": "observation", "data": step})
                continue
            match self.case:
                case "huge" | "compressed":
                    await socket.send_str(" " * (40 << 20))
                case "trickling":
                    while True:
                        await socket.ping()
                        await asyncio.sleep(0.05)
                case "an error":
                    await socket.send_json(
                        {"type": "error", "data": {"message": "x" * 10_000, "code": "EXECUTION_ERROR"}}
                    )
                case "closed":
                    assert request.transport is not None
                    request.transport.abort()
                case _:
                    await socket.send_str(await self._text({"type": "observation", "data": step | {"reward": 0.5}}))
        return socket

    async def _text(self, usual: dict[str, Any]) -> str:
        match self.case:
            case "slow":
                await asyncio.sleep(LIMIT_S)
            case "no JSON":
                return "<html>"
            case "a list":
                return "[1]"
            case "nested":
                return "[" * 100_000
            case "half a character":
                return json.dumps(usual).replace("3+4=", "\\ud800")
            case "no reward":
                return json.dumps(usual).replace("0.5", '"much"')
        return json.dumps(usual)


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


@pytest.fixture(scope="module", params=["nemo_gym", "openenv"])
def environment(request: pytest.FixtureRequest, server: Server) -> Iterator[FunctionProcesses]:
    args = {"url": server.url, "timeout_s": 2}
    processes = FunctionProcesses(
        NamedAgent(None, request.param, args, None), PYTHON if request.param == "openenv" else None
    )
    processes.start()
    yield processes
    processes.close()


def episode(environment: FunctionProcesses) -> ProgramResult:
    gateway = Gateway("127.0.0.1")
    session = session_of(Policy(lambda seen: "7"), max_turns=TURNS)
    gateway.add(session)

    async def run() -> ProgramResult:
        async with asyncio.timeout(LIMIT_S):
            return await environment.run(gateway.url, session.key, ROW)

    return asyncio.run(run())


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_server_is_a_failure_of_its_class(environment: FunctionProcesses, server: Server, case: str) -> None:
    server.case = case
    with pytest.raises(ProgramError) as raised:
        episode(environment)
    assert raised.value.failure in CASES[case].split("|"), raised.value
    assert len(str(raised.value)) < 2000


@pytest.mark.parametrize("case", ["usual", "half a character"])
def test_an_episode_that_never_ends_has_its_rewards_until_the_limit(
    environment: FunctionProcesses, server: Server, case: str
) -> None:
    server.case = case
    assert episode(environment).reward == TURNS * 0.5
