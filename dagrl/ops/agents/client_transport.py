"""Connections that the OpenAI clients of a worker's functions share.

httpx's own pool looks at all of its connections for each request, which takes most of the time with hundreds of them.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import AsyncIterator
from concurrent.futures import TimeoutError as TooSlowError
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx

from dagrl.bounded_http import CONNECTING, check_redirect

_KEPT_S, _CLOSE_S = 60.0, 1.0


class Connector(aiohttp.TCPConnector):
    """Any number of connections, of which `CONNECTING` are being opened at a time."""

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=_KEPT_S)
        self._connecting = asyncio.Semaphore(CONNECTING)

    async def connect(self, *args: Any, **options: Any) -> aiohttp.connector.Connection:
        async with self._connecting:
            return await super().connect(*args, **options)


def open_session() -> aiohttp.ClientSession:
    """A session without limits on the running event loop, closed when the process ends.

    It leaves compressed answers as they are, and raises AnswerError if a redirect leads to another service.
    """
    redirects = aiohttp.TraceConfig()
    redirects.on_request_redirect.append(_check_redirect)
    session = aiohttp.ClientSession(
        connector=Connector(),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        trace_configs=[redirects],
    )
    loop = asyncio.get_running_loop()

    def close() -> None:
        if loop.is_closed():
            return
        # Otherwise the library names each connection on standard error.
        with suppress(TooSlowError):
            asyncio.run_coroutine_threadsafe(session.close(), loop).result(_CLOSE_S)

    atexit.register(close)
    return session


async def _check_redirect(
    session: aiohttp.ClientSession, context: SimpleNamespace, redirect: aiohttp.TraceRequestRedirectParams
) -> None:
    answer = redirect.response
    check_redirect(str(answer.url), answer.headers.get("Location") or answer.headers.get("URI") or "")


class ClientTransport(httpx.AsyncBaseTransport):
    """A transport over aiohttp, which no client closes. Used on one event loop."""

    def __init__(self) -> None:
        self._session = open_session()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        try:
            answer = await self._session.request(
                request.method,
                str(request.url),
                headers=request.headers.multi_items(),
                data=body,
                allow_redirects=False,
            )
        except aiohttp.ClientError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        return httpx.Response(answer.status, headers=[*answer.headers.items()], stream=_Body(answer))


class _Body(httpx.AsyncByteStream):
    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._answer.content.iter_any():
                yield chunk
        except aiohttp.ClientError as error:
            raise httpx.ReadError(str(error)) from error

    async def aclose(self) -> None:
        self._answer.release()
