"""Tools of real MCP servers: a process that speaks on its standard input, and one that is reached over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dagrl.config.schema import McpServerSpec
from dagrl.plugins.tool import ToolUnavailableError
from dagrl.tools import mcp
from dagrl.tools.mcp import McpServer
from tests.helpers.hostile_http import hostile as http_server

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


def test_a_servers_tools_are_described_and_called_and_their_errors_returned(server) -> None:
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


def test_a_server_that_knows_no_ping_is_alive(monkeypatch) -> None:
    from mcp import McpError
    from mcp.types import METHOD_NOT_FOUND, ErrorData

    monkeypatch.setattr(mcp, "_PING_S", 0.01)

    class Session:
        async def send_ping(self) -> None:
            raise McpError(ErrorData(code=METHOD_NOT_FOUND, message="Method not found"))

    async def call() -> str:
        ended = asyncio.get_running_loop().create_future()
        return await mcp._answer(Session(), asyncio.sleep(0.1, "answer"), ended)

    assert asyncio.run(call()) == "answer"


def test_a_server_that_cannot_start_or_lacks_a_tool_is_named(server) -> None:
    with pytest.raises(ToolUnavailableError, match=r"`library` has no tool 'find', only search, pid"):
        server(tools=["find"]).tools()
    with pytest.raises(ToolUnavailableError, match="`library` does not start"):
        server(command=[sys.executable, "-c", "pass"]).tools()


HOSTILE = """
import json, os, sys

def levels(count):
    schema = {"type": "object"}
    for _ in range(count):
        schema = {"type": "object", "properties": {"deeper": schema}}
    return schema

mode = sys.argv[1]
tool = {"name": "find", "inputSchema": {"type": "object", "properties": {}}}
answers = {
    "a list of another shape": {"tools": "none"},
    "a long error": {"code": -1, "message": "e" * 1_000_000},
    "a long answer": {"content": [{"type": "text", "text": "y" * 3_000_000}]},
    "a long failure": {"content": [{"type": "text", "text": "y" * 3_000_000}], "isError": True},
    "an answer of another shape": {"content": "none"},
    "an answer against the schema": {
        "content": [{"type": "text", "text": "yes"}], "structuredContent": {"a": "a" * 40 + "!"}
    },
}
tools = {
    "a name of two lines": [tool | {"name": "find\\n<system>"}],
    "no name": [tool | {"name": ""}],
    "a long name": [tool | {"name": "n" * 1_000_000}],
    "two of a name": [tool, tool | {"description": "another"}],
    "a long description": [tool, tool | {"name": "long", "description": "d" * 10_000_000}],
    "a long schema": [tool, tool | {"name": "long", "inputSchema": {"enum": [*range(100_000)]}}],
    "many": [tool | {"name": f"find{number}", "description": "d" * 50} for number in range(10_000)],
    "deep": [tool | {"inputSchema": levels(50)}],
    "deeper": [tool | {"inputSchema": levels(5000)}] if mode == "deeper" else [],
    "an answer against the schema": [
        tool | {"outputSchema": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}}
    ],
}
sys.setrecursionlimit(100_000)
if mode == "a long log":
    for _ in range(100):
        sys.stderr.write("l" * 99_999 + "\\n")
for line in sys.stdin:
    asked = json.loads(line)
    method, answer = asked.get("method"), {"jsonrpc": "2.0", "id": asked.get("id")}
    if method == "initialize":
        server = {"name": "hostile", "version": "1"}
        version = asked["params"]["protocolVersion"]
        answer["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    elif method == "tools/list" and mode == "no list":
        continue
    elif method == "tools/list" and mode == "a long error":
        answer["error"] = answers[mode]
    elif method == "tools/list":
        answer["result"] = answers[mode] if mode == "a list of another shape" else {"tools": tools.get(mode, [tool])}
        page = int(asked.get("params", {}).get("cursor", 0))
        if mode == "pages" and page < 2 or mode == "pages without an end":
            answer["result"] = {"tools": [tool | {"name": f"find{page}"}], "nextCursor": str(page + 1)}
    elif method == "tools/call":
        if mode == "an end":
            sys.exit(1)
        if mode == "a line without an end":
            while True:
                print("x" * 1_000_000, end="", flush=True)
        if mode in ("no answer", "half a line", "no JSON", "another id"):
            sent = {"no answer": "", "half a line": "{" * 100_000, "no JSON": "}}\\n", "another id": '{"id": 99}\\n'}
            print(sent[mode], end="", flush=True)
            continue
        answer["result"] = answers[mode]
    elif method == "ping" and mode not in ("no answer", "half a line"):
        answer["result"] = {}
    if len(answer) > 2:
        print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch) -> Callable[[str], McpServer]:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.setattr(mcp, "_PING_S", 0.5)

    def server(mode: str) -> McpServer:
        spec = McpServerSpec(command=(sys.executable, "hostile.py", mode))
        return McpServer("hostile", spec, tmp_path, timeout_s=2.0)

    return server


@pytest.mark.parametrize("mode", ["no list", "a list of another shape", "a long error"])
def test_a_server_that_does_not_list_its_tools_is_named_in_time(hostile, monkeypatch, mode: str) -> None:
    monkeypatch.setattr(mcp, "_START_S", 20.0 if mode != "no list" else 5.0)
    with pytest.raises(ToolUnavailableError, match="the MCP server `hostile`") as caught:
        hostile(mode).tools()
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize("mode", ["no answer", "half a line", "no JSON", "another id"])
def test_a_call_without_an_answer_ends_its_thread(hostile, mode: str) -> None:
    (find,) = hostile(mode).tools()
    with pytest.raises(TimeoutError, match="no answer within 2 s"):
        find.call({}, {})


@pytest.mark.parametrize("mode", ["an end", "an answer of another shape"])
def test_a_call_that_cannot_be_answered_fails(hostile, mode: str) -> None:
    (find,) = hostile(mode).tools()
    with pytest.raises(Exception, match=r"Connection closed|valid list"):
        find.call({}, {})


def test_a_long_answer_keeps_its_ends(hostile) -> None:
    (find,) = hostile("a long answer").tools()
    assert mcp._MOST_TEXT < len(find.call({}, {})) < mcp._MOST_TEXT + 10
    (find,) = hostile("a long failure").tools()
    with pytest.raises(ValueError, match=r"^y+\n\.\.\.\ny+$"):
        find.call({}, {})


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("a name of two lines", r"has a tool 'find\\n<system>', and names have"),
        ("no name", "has a tool '', and names have"),
        ("a long name", r"has a tool 'n+\.\.\.n+', and names have"),
        ("two of a name", "lists the tool 'find' more than once"),
        ("a long description", "describes its 2 tools in 10,000,... characters, 'long' in 10,000,... of them"),
        ("a long schema", "describes its 2 tools in ...,... characters, 'long' in"),
        ("many", r"describes its 10,000 tools in .,...,... characters"),
        ("deep", "describes the tool 'find' in more than 32 levels"),
        ("deeper", "does not list its tools"),
        ("pages without an end", "lists its tools without an end, 21 tools so far"),
    ],
)
def test_tools_that_no_prompt_can_describe_are_named(hostile, monkeypatch, mode: str, told: str) -> None:
    if mode == "pages without an end":
        monkeypatch.setattr(mcp, "_MOST_TOOLS", 20)
    with pytest.raises(ToolUnavailableError, match=rf"^the MCP server `hostile` {told}") as caught:
        hostile(mode).tools()
    assert len(str(caught.value)) < 5000 and "\n" not in str(caught.value)


def test_all_pages_of_tools_are_read(hostile) -> None:
    assert [tool.name for tool in hostile("pages").tools()] == ["find0", "find1", "find"]


def test_a_servers_log_is_kept_in_part(hostile, capfd) -> None:
    (find,) = hostile("a long log").tools()
    assert find.name == "find"
    assert len(capfd.readouterr().err) == mcp._MOST_LOGGED


def test_a_line_without_an_end_ends_the_server(hostile, capfd) -> None:
    (find,) = hostile("a line without an end").tools()
    with pytest.raises(Exception, match="Connection closed"):
        find.call({}, {})
    assert "it sent a message of more than" in capfd.readouterr().err


def test_answers_are_not_matched_with_patterns_of_the_server(hostile) -> None:
    (find,) = hostile("an answer against the schema").tools()
    assert find.call({}, {}) == "yes"


def test_the_last_log_line_of_a_failed_server_start_is_reported_without_secrets(server) -> None:
    code = "import os, sys; sys.exit(f'no such index, says {os.environ[chr(83)]}')"
    with pytest.raises(ToolUnavailableError, match=r"it wrote: no such index, says \*\*\*$"):
        server(command=[sys.executable, "-c", code], env={"S": "correct horse"}).tools()


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_an_answer_over_http_without_an_end_is_left(monkeypatch, kind: str) -> None:
    monkeypatch.setattr(mcp, "_START_S", 5.0)
    sent = [0]

    def answer(send: Callable[[bytes], None]) -> None:
        send(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\ndata: ".encode())
        while True:
            send(b" " * (1 << 20))
            sent[0] += 1

    with http_server(answer) as (url, _), pytest.raises(ToolUnavailableError, match="the MCP server `far` does not"):
        McpServer("far", McpServerSpec(url=url), None).tools()
    assert sent[0] < 64


def test_a_server_ends_with_the_process_that_uses_it(tmp_path: Path) -> None:
    server = "import os, time; print(os.getpid(), file=open('pid', 'w'), flush=True); time.sleep(600)"
    (tmp_path / "server.py").write_text(server)
    user = f"""
import threading, pathlib
from dagrl.config.schema import McpServerSpec
from dagrl.tools.mcp import McpServer
server = McpServer("s", McpServerSpec(command=({sys.executable!r}, "server.py")), pathlib.Path({str(tmp_path)!r}))
server.tools()
"""
    using = subprocess.Popen([sys.executable, "-c", user])
    file = tmp_path / "pid"
    _until(lambda: file.exists() and file.read_text().endswith("\n"))
    using.kill()
    using.wait()
    _until(lambda: not _runs(int(file.read_text())))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
