"""An HTTP client for services that may answer with anything: of any length, at any pace, or with another address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx

MOST_BYTES = 16 << 20
"""Bytes of an answer."""
CONNECTING = 4
"""Connections that a client opens at a time. A server's system queues connections that the server has not accepted, 5
in Python's own servers, and ignores others, which are retried after one second, three, seven and so on: 400 to such a
server take 4.5 s, all at once 55 s."""


class AnswerError(httpx.HTTPError):
    """The answer of a service is not accepted; the message begins with the reason."""


class BoundedClient(httpx.AsyncClient):
    """A client whose requests end within a time, and whose answers have at most `MOST_BYTES`.

    Opens `CONNECTING` connections at a time.

    Follows redirects within a service only, as keys and rows are for that service alone, and accepts no compressed
    answers, whose length is not known.
    """

    def __init__(self, total_s: float, **options: Any) -> None:
        """A request takes at most `total_s`, except a GET, whose answer may be a stream of events."""
        super().__init__(
            headers={"Accept-Encoding": "identity"},
            event_hooks={"response": [_bound, _check_redirect]},
            timeout=total_s,
            # As many as ask at a time: to wait for a connection would take time from the request.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
            **options,
        )
        self._total_s = total_s
        self._connecting = asyncio.Semaphore(CONNECTING)

    async def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        request.extensions["trace"] = self._ramp
        deadline = None if request.method == "GET" else asyncio.get_running_loop().time() + self._total_s
        try:
            async with asyncio.timeout_at(deadline):
                answer = await super().send(request, stream=True, **options)
        except TimeoutError as error:
            raise httpx.ReadTimeout("no answer in time", request=request) from error
        assert isinstance(answer.stream, _BoundedStream), "set by the hook"
        answer.stream.deadline = deadline
        # A service could name a codec that does not decode text, or that decompresses.
        answer.encoding = "utf-8"
        if not stream:
            try:
                await answer.aread()
            finally:
                await answer.aclose()
        return answer

    async def _ramp(self, event: str, info: dict[str, Any]) -> None:
        """Hold a new connection back while others are being opened: httpx waits for those that it informs."""
        del info
        if event == "connection.connect_tcp.started":
            await self._connecting.acquire()
        elif event in ("connection.connect_tcp.complete", "connection.connect_tcp.failed"):
            self._connecting.release()


class _BoundedStream(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream
        self.deadline: float | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, parts = 0, aiter(self._stream)
        while True:
            try:
                async with asyncio.timeout_at(self.deadline):
                    part = await anext(parts)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise httpx.ReadTimeout("no complete answer in time") from error
            size += len(part)
            if size > MOST_BYTES:
                raise AnswerError(f"answers with more than {MOST_BYTES >> 20} MiB")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _bound(answer: httpx.Response) -> None:
    """Before the client reads anything: it reads the bodies of redirects itself."""
    encoding = answer.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise AnswerError(f"answers in the encoding {encoding[:40]!r}, which was not asked for")
    assert isinstance(answer.stream, httpx.AsyncByteStream), "of an asynchronous client"
    answer.stream = _BoundedStream(answer.stream)


async def _check_redirect(answer: httpx.Response) -> None:
    if answer.has_redirect_location:
        check_redirect(str(answer.url), answer.headers["location"])


def check_redirect(url: str, location: str) -> None:
    """Raise AnswerError if a redirect leads to another service than that of `url`."""
    try:
        source, target = urlsplit(url), urlsplit(urljoin(url, location))
        ports = source.port, target.port
    except ValueError as error:
        raise AnswerError("answers with a redirect to no address") from error
    same = source.scheme == target.scheme and source.netloc == target.netloc
    encrypted = (source.scheme, target.scheme) == ("http", "https") and source.hostname == target.hostname
    if not same and not (encrypted and ports[0] in (None, 80) and ports[1] in (None, 443)):
        where = f"{target.scheme}://{target.netloc.rpartition('@')[2]}"
        raise AnswerError(f"answers with a redirect to {where[:200]}, another service")
