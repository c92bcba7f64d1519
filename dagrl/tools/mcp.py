"""Tools of MCP servers, through the official client: https://modelcontextprotocol.io."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from dagrl.config.errors import bounded
from dagrl.config.schema import McpServerSpec
from dagrl.graph.plugins.tool import ToolUnavailableError

_START_S, _PING_S = 60.0, 5.0
_MOST_TEXT = 1 << 20
"""Characters of an answer that are kept, half of them at each end: a server may send any number, and all of them would
be tokenised before they are cut."""


class McpServer:
    """A connection to one server, opened again after a call that has found it lost. Thread-safe."""

    def __init__(self, name: str, spec: McpServerSpec, folder: Path | None, timeout_s: float = _START_S) -> None:
        """Nothing is started before the first use. Commands run in `folder`. A call takes at most `timeout_s`."""
        self._name, self._spec, self._folder, self._timeout_s = name, spec, folder, timeout_s
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"mcp {name}", daemon=True).start()
        self._lock = threading.Lock()
        self._session: tuple[Any, asyncio.Future[None]] | None = None
        self._connection: Future[None] | None = None

    def tools(self) -> list[McpTool]:
        """The server's tools, or those that the pipeline names. Raises ToolUnavailableError."""
        try:
            listed = self._run("list_tools", timeout_s=_START_S)
        except ToolUnavailableError:
            raise
        except Exception as error:  # whatever the client makes of what the server sends
            raise ToolUnavailableError(
                f"the MCP server `{self._name}` does not list its tools: {_cause(error)}"
            ) from error
        described = {tool["name"]: tool for tool in listed["tools"]}
        wanted = described if self._spec.tools is None else self._spec.tools
        unknown = [name for name in wanted if name not in described]
        if unknown:
            raise ToolUnavailableError(
                f"the MCP server `{self._name}` has no tool {unknown[0]!r}, only {', '.join(described)}"
            )
        return [McpTool(self, described[name]) for name in wanted]

    def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a call, as the protocol has it. Raises ToolUnavailableError if the server cannot be reached."""
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
        # By the protocol's own names, which all versions of the client write.
        return answer.model_dump(by_alias=True, mode="json")

    def _leave_if_lost(self, session: Any) -> None:
        """Let the next call connect again if the server no longer answers."""
        try:
            asyncio.run_coroutine_threadsafe(session.send_ping(), self._loop).result(_PING_S)
        except Exception:  # noqa: BLE001 - however it is lost
            if self._connection is not None:
                self._connection.cancel()

    def _connected(self) -> tuple[Any, asyncio.Future[None]]:
        """The session, and a future that is done when the session has ended."""
        with self._lock:
            if self._connection is None or self._connection.done():
                ready: Future[tuple[Any, asyncio.Future[None]]] = Future()
                self._connection = asyncio.run_coroutine_threadsafe(self._connect(ready), self._loop)
                try:
                    self._session = ready.result(_START_S)
                except Exception as error:
                    # The library wraps what went wrong in groups of any depth.
                    raise ToolUnavailableError(
                        f"the MCP server `{self._name}` does not start or cannot be reached: {_cause(error)}"
                    ) from error
            assert self._session is not None, "set with the connection"
            return self._session

    async def _connect(self, ready: Future[tuple[Any, asyncio.Future[None]]]) -> None:
        """Keep a session open until the server is gone."""
        from mcp import ClientSession

        ended: asyncio.Future[None] = self._loop.create_future()
        try:
            async with AsyncExitStack() as stack:
                streams = await stack.enter_async_context(self._transport())
                session = await stack.enter_async_context(ClientSession(*streams[:2]))
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

            return streamable_http_client(self._spec.url)
        from mcp import StdioServerParameters, stdio_client

        assert self._spec.command is not None, "one of the two is set"
        program, *arguments = self._spec.command
        program = sys.executable if program == "python" else program
        return stdio_client(
            StdioServerParameters(command=program, args=arguments, env=dict(self._spec.env), cwd=self._folder)
        )


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
            # A server that works on the call may not answer, but a lost one cannot be sent to.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.send_ping(), _PING_S)
    finally:
        asked.cancel()


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
        """The text of the server's answer. ValueError with its text if that is an error."""
        del extra_info  # the server has its own data
        result = self._server.call(self.name, arguments)
        text = "\n".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in result["content"])
        if len(text) > _MOST_TEXT:
            text = f"{text[: _MOST_TEXT // 2]}\n...\n{text[-_MOST_TEXT // 2 :]}"
        if result.get("isError"):
            raise ValueError(text)
        return text


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return bounded(str(error) or type(error).__name__)
