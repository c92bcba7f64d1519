"""Connections that the OpenAI clients of a worker's functions share.

httpx's own pool looks at all of its connections for each request, which takes most of the time with hundreds of them.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import AsyncIterator
from concurrent.futures import TimeoutError as TooSlowError
from contextlib import suppress

import aiohttp
import httpx

_KEPT_S, _CLOSE_S = 60.0, 1.0


def open_session(*, decompress: bool) -> aiohttp.ClientSession:
    """A session without limits on the running event loop, closed when the process ends."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=decompress,
    )
    loop = asyncio.get_running_loop()

    def close() -> None:
        # Otherwise the library names each connection on standard error.
        with suppress(TooSlowError):
            asyncio.run_coroutine_threadsafe(session.close(), loop).result(_CLOSE_S)

    atexit.register(close)
    return session


class ClientTransport(httpx.AsyncBaseTransport):
    """A transport over aiohttp, which no client closes. Used on one event loop."""

    def __init__(self) -> None:
        self._session = open_session(decompress=False)

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
