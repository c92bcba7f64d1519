"""Tools of MCP servers, through the official client: https://modelcontextprotocol.io."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TextIO

from dagrl.config.errors import bounded, counted, in_one_line
from dagrl.config.schema import McpServerSpec
from dagrl.plugins.tool import ToolUnavailableError
from dagrl.redact import hiding

_START_S, _PING_S, _LAST_LINE_S = 60.0, 5.0, 1.0
_MOST_TEXT = 1 << 20
"""Most characters kept of an answer, half at each end: a server may send any number, and all would be tokenised before
the cut."""
_MOST_SENT, _MOST_LOGGED = 16 << 20, 1 << 20
"""Bytes of a message of a server, and of its standard error in the worker's log."""
_MOST_DESCRIBED, _DEEPEST = 1 << 18, 32
"""Most characters of the descriptions of a server's tools, which are part of each prompt, and levels of a
description."""
_MOST_TOOLS = 10_000
_NAME = re.compile(r"[\w./:-]{1,128}")
_RELAY = Path(__file__).with_name("mcp_relay.py")


class McpServer:
    """A connection to one server, reopened after a call found it lost. Thread-safe."""

    def __init__(self, name: str, spec: McpServerSpec, folder: Path | None, timeout_s: float = _START_S) -> None:
        """Nothing is started before the first use. Commands run in `folder`. A call takes at most `timeout_s`."""
        self._name, self._spec, self._folder, self._timeout_s = name, spec, folder, timeout_s
        self._last_line, self._logging = "", threading.Thread()
        self._hide = hiding({"env": spec.env})
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"mcp {name}", daemon=True).start()
        self._lock = threading.Lock()
        self._session: tuple[Any, asyncio.Future[None]] | None = None
        self._connection: Future[None] | None = None

    def tools(self) -> list[McpTool]:
        """The server's tools, or the ones that the pipeline names. Raises ToolUnavailableError."""
        try:
            listed = self._listed()
        except ToolUnavailableError:
            raise
        except Exception as error:  # The client may raise any error on malformed answers.
            raise ToolUnavailableError(
                f"the MCP server `{self._name}` does not list its tools: {self._cause(error)}"
            ) from error
        described = {tool["name"]: tool for tool in listed}
        wanted = described if self._spec.tools is None else self._spec.tools
        unknown = [name for name in wanted if name not in described]
        if unknown:
            raise self._refused(f"has no tool {unknown[0]!r}, only {', '.join(described)}")
        times = Counter(tool["name"] for tool in listed)
        if doubled := [name for name in wanted if times[name] > 1]:
            raise self._refused(f"lists the tool {doubled[0]!r} more than once")
        return self._checked([described[name] for name in wanted])

    def _listed(self) -> list[dict[str, Any]]:
        """All pages of the server's list of tools."""
        until = time.monotonic() + _START_S
        tools: list[dict[str, Any]] = []
        asked: tuple[str, ...] = ()
        while True:
            page = self._run("list_tools", *asked, timeout_s=_START_S)
            tools += page["tools"]
            if not page.get("nextCursor"):
                return tools
            if len(tools) > _MOST_TOOLS or time.monotonic() > until:
                raise self._refused(f"lists its tools without an end, {counted(len(tools), 'tool')} so far")
            asked = (page["nextCursor"],)

    def _checked(self, described: Sequence[Mapping[str, Any]]) -> list[McpTool]:
        """The tools. Raises ToolUnavailableError if a prompt cannot describe them all."""
        tools = []
        for tool in described:
            if not _NAME.fullmatch(tool["name"]):
                raise self._refused(
                    f"has a tool {tool['name']!r}, and names have at most 128 letters, digits and any of `_-./:`"
                )
            if _depth(tool["inputSchema"]) > _DEEPEST:
                raise self._refused(f"describes the tool {tool['name']!r} in more than {_DEEPEST} levels")
            tools.append(McpTool(self, tool))
        sizes = {tool.name: len(json.dumps(tool.schema)) for tool in tools}
        if sum(sizes.values()) > _MOST_DESCRIBED:
            longest = max(sizes, key=lambda name: sizes[name])
            raise self._refused(
                f"describes its {counted(len(tools), 'tool')} in {sum(sizes.values()):,} characters, {longest!r} in "
                f"{sizes[longest]:,} of them, and a prompt has room for {_MOST_DESCRIBED:,}; name fewer in `tools`"
            )
        return tools

    def _refused(self, why: str) -> ToolUnavailableError:
        return ToolUnavailableError(bounded(in_one_line(f"the MCP server `{self._name}` {why}")))

    def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a call in the protocol's format. Raises ToolUnavailableError for an unreachable server."""
        return self._run("call_tool", name, dict(arguments), timeout_s=self._timeout_s)

    def _run(self, method: str, *arguments: Any, timeout_s: float) -> dict[str, Any]:
        session, ended = self._connected()
        call = _answer(session, getattr(session, method)(*arguments), ended)
        asked = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            answer = asked.result(timeout_s)
        except TimeoutError:
            asked.cancel()
            self._leave_if_lost(session)
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        except Exception:
            self._leave_if_lost(session)
            raise
        # With the protocol's names, which all versions of the client write.
        return answer.model_dump(by_alias=True, mode="json")

    def _leave_if_lost(self, session: Any) -> None:
        """Let the next call connect again if the server no longer answers."""
        try:
            asyncio.run_coroutine_threadsafe(session.send_ping(), self._loop).result(_PING_S)
        except Exception as error:  # noqa: BLE001 - however it is lost
            # A newer session may have taken its place.
            current = self._session is not None and self._session[0] is session
            if current and self._connection is not None and not _is_alive(error):
                self._connection.cancel()

    def _connected(self) -> tuple[Any, asyncio.Future[None]]:
        """The session, and a future that completes when the session ends."""
        with self._lock:
            if self._connection is None or self._connection.done():
                ready: Future[tuple[Any, asyncio.Future[None]]] = Future()
                self._connection = asyncio.run_coroutine_threadsafe(self._connect(ready), self._loop)
                try:
                    self._session = ready.result(_START_S)
                except Exception as error:
                    self._connection.cancel()
                    # The library wraps errors in exception groups of any depth.
                    raise ToolUnavailableError(
                        f"the MCP server `{self._name}` does not start or cannot be reached: {self._cause(error)}"
                    ) from error
            assert self._session is not None, "set with the connection"
            return self._session

    async def _connect(self, ready: Future[tuple[Any, asyncio.Future[None]]]) -> None:
        """Keep a session open until the server is gone."""
        from mcp import ClientSession

        class Session(ClientSession):
            async def _validate_tool_result(self, *arguments: Any) -> None:
                """Do not validate answers against the server's schema, whose patterns can take any time."""

        ended: asyncio.Future[None] = self._loop.create_future()
        try:
            async with AsyncExitStack() as stack:
                streams = await stack.enter_async_context(self._transport())
                session = await stack.enter_async_context(Session(*streams[:2]))
                await session.initialize()
                ready.set_result((session, ended))
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 - raised by the call that waits, or the next one connects again
            if not ready.done():
                ready.set_exception(error)
        finally:
            ended.set_result(None)

    def _transport(self) -> Any:
        if self._spec.url is not None:
            from mcp.client.streamable_http import streamable_http_client

            return self._over_http(streamable_http_client, self._spec.url)
        from mcp import StdioServerParameters, stdio_client

        assert self._spec.command is not None, "one of the two is set"
        program, *arguments = self._spec.command
        program = sys.executable if program == "python" else program
        relay = ["-I", "-S", str(_RELAY), str(os.getpid()), str(_MOST_SENT), program, *arguments]
        server = StdioServerParameters(command=sys.executable, args=relay, env=dict(self._spec.env), cwd=self._folder)
        return self._logged(lambda log: stdio_client(server, log))

    @contextlib.asynccontextmanager
    async def _over_http(self, opened: Callable[..., Any], url: str) -> AsyncIterator[Any]:
        from dagrl.bounded_http import BoundedClient

        longest = max(_START_S, self._timeout_s)
        async with BoundedClient(longest) as client, opened(url, http_client=client) as streams:
            yield streams

    @contextlib.asynccontextmanager
    async def _logged(self, opened: Callable[[TextIO], Any]) -> AsyncIterator[Any]:
        """Context of a server whose standard error goes to a file; the log keeps its beginning."""
        written, log = os.pipe()
        self._logging = threading.Thread(target=self._log, args=(written,), name=f"log of {self._name}", daemon=True)
        self._logging.start()
        with os.fdopen(log, "w") as file:
            async with opened(file) as streams:
                file.close()
                yield streams

    def _log(self, written: int) -> None:
        logged, end = 0, b""
        with os.fdopen(written, "rb", buffering=0) as stderr:
            while part := stderr.read(1 << 16):
                sys.stderr.write(part[: _MOST_LOGGED - logged].decode(errors="replace"))
                logged = min(_MOST_LOGGED, logged + len(part))
                end = (end + part)[-2000:]
                self._last_line = "".join(end.decode(errors="replace").strip().splitlines()[-1:])

    def _cause(self, error: BaseException) -> str:
        """The reason why the server cannot be used: the client's error, and the server's last line of output."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if self._logging.is_alive():
            self._logging.join(_LAST_LINE_S)
        line = self._hide(self._last_line)[:200]
        return bounded(in_one_line((str(error) or type(error).__name__) + (f"; it wrote: {line}" if line else "")))


async def _answer(session: Any, call: Coroutine[Any, Any, Any], ended: asyncio.Future[None]) -> Any:
    """Return the answer to a call. The client itself waits forever if the server dies while a request is sent."""
    asked = asyncio.ensure_future(call)
    try:
        while True:
            await asyncio.wait({asked, ended}, timeout=_PING_S, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            if ended.done():
                raise ConnectionError("the server has ended")
            # A busy server may not answer, but sending to a lost one fails.
            try:
                await asyncio.wait_for(session.send_ping(), _PING_S)
            except TimeoutError:
                pass
            except Exception as error:
                if not _is_alive(error):
                    raise
    finally:
        asked.cancel()


def _is_alive(error: Exception) -> bool:
    """Whether a server answered a ping with an error: some servers do not support pings."""
    from mcp import McpError
    from mcp.types import METHOD_NOT_FOUND

    return isinstance(error, McpError) and error.error.code == METHOD_NOT_FOUND


class McpTool:
    """One tool of a server."""

    def __init__(self, server: McpServer, described: Mapping[str, Any]) -> None:
        self._server = server
        self.name: str = described["name"]
        function = {
            "name": self.name,
            "description": described.get("description") or "",
            "parameters": described["inputSchema"],
        }
        self.schema: dict[str, Any] = {"type": "function", "function": function}
        """The description for chat templates, in OpenAI's format."""

    def call(self, arguments: Mapping[str, Any], extra_info: Mapping[str, Any]) -> str:
        """The text of the server's answer. Raises ValueError with this text if it is an error."""
        del extra_info  # the server has its own data
        result = self._server.call(self.name, arguments)
        text = "\n".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in result["content"])
        if len(text) > _MOST_TEXT:
            text = f"{text[: _MOST_TEXT // 2]}\n...\n{text[-_MOST_TEXT // 2 :]}"
        if result.get("isError"):
            raise ValueError(text)
        return text


def _depth(value: object) -> int:
    """Levels of nested lists and mappings; the client bounds them."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, items), default=0)
