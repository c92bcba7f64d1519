"""Tools of real MCP servers: a process that speaks on its standard input, and one that is reached over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dagrl.config.schema import McpServerSpec
from dagrl.graph.plugins.tool import ToolUnavailableError
from dagrl.tools import mcp
from dagrl.tools.mcp import McpServer

SERVER = '''
import os
from mcp.server.fastmcp import FastMCP

server = FastMCP("library")

@server.tool()
def search(query: str, count: int = 1) -> str:
    """Look something up."""
    if query == "nothing":
        raise ValueError("there is nothing")
    return f"{query} {count} {os.environ.get('SHELF', '')}".strip()

@server.tool()
def pid() -> int:
    """The process."""
    return os.getpid()

server.run()
'''


@pytest.fixture
def server(tmp_path: Path) -> Callable[..., McpServer]:
    (tmp_path / "library.py").write_text(SERVER)

    def server(**fields: object) -> McpServer:
        spec = {"command": [sys.executable, "library.py"], "env": {"SHELF": "top"}, **fields}
        return McpServer("library", McpServerSpec.model_validate(spec), tmp_path)

    return server


def test_a_servers_tools_are_described_called_and_their_errors_told(server) -> None:
    tools = {tool.name: tool for tool in server().tools()}
    assert list(tools) == ["search", "pid"]
    function = tools["search"].schema["function"]
    assert function["description"] == "Look something up."
    assert function["parameters"]["required"] == ["query"]
    assert tools["search"].call({"query": "cats"}, {}) == "cats 1 top"
    with pytest.raises(ValueError, match="there is nothing"):
        tools["search"].call({"query": "nothing"}, {})
    with pytest.raises(ValueError, match="query"):
        tools["search"].call({}, {})


def test_a_server_that_has_died_is_started_again(server) -> None:
    (pid,) = server(tools=["pid"]).tools()
    first = int(pid.call({}, {}))
    os.kill(first, signal.SIGKILL)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            assert int(pid.call({}, {})) != first
            return
        except Exception:  # noqa: BLE001 - of a connection that has just been lost
            time.sleep(0.2)
    raise AssertionError("no new server")


@pytest.mark.parametrize("ends", ["session", "stream"])
def test_a_call_ends_if_the_client_waits_for_a_server_that_is_gone(monkeypatch, ends: str) -> None:
    monkeypatch.setattr(mcp, "_PING_S", 0.05)

    class Session:
        def __init__(self) -> None:
            self.ended = asyncio.get_running_loop().create_future()

        async def send_ping(self) -> None:
            if ends == "stream":
                raise BrokenPipeError("closed")
            self.ended.set_result(None)

    async def call() -> None:
        session = Session()
        await mcp._answer(session, asyncio.sleep(100), session.ended)

    with pytest.raises(ConnectionError, match="closed" if ends == "stream" else "the server has ended"):
        asyncio.run(call())


def test_a_server_that_cannot_start_or_lacks_a_tool_is_named(server) -> None:
    with pytest.raises(ToolUnavailableError, match=r"`library` has no tool 'find', only search, pid"):
        server(tools=["find"]).tools()
    with pytest.raises(ToolUnavailableError, match="`library` does not start"):
        server(command=[sys.executable, "-c", "pass"]).tools()
