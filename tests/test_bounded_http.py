"""Connections to judges and other services are not opened all at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import httpx
import pytest
from aiohttp import web
from httpcore._backends.auto import AutoBackend

from dagrl.bounded_http import CONNECTING, AnswerError, BoundedClient

REQUESTS = 20


@pytest.fixture
def opening(monkeypatch) -> list[int]:
    """Connections that are being opened, at each moment in which one more is."""
    now, seen = 0, []
    connect = AutoBackend.connect_tcp

    async def counted(self, *args, **options):
        nonlocal now
        now += 1
        seen.append(now)
        try:
            await asyncio.sleep(0.01)
            return await connect(self, *args, **options)
        finally:
            now -= 1

    monkeypatch.setattr(AutoBackend, "connect_tcp", counted)
    return seen


def test_few_connections_are_opened_at_a_time_and_many_are_open(opening) -> None:
    async def act() -> None:
        working, all_there = 0, asyncio.Event()

        async def answer(_: web.Request) -> web.Response:
            nonlocal working
            working += 1
            if working == REQUESTS:
                all_there.set()
            await all_there.wait()
            return web.json_response({})

        application = web.Application()
        application.router.add_post("/", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with BoundedClient(60.0) as client:
            replies = await asyncio.gather(*(client.post(address) for _ in range(REQUESTS)))
        assert all(reply.status_code == 200 for reply in replies)
        await runner.cleanup()

    asyncio.run(act())
    assert (len(opening), max(opening)) == (REQUESTS, CONNECTING)


def test_connections_that_fail_or_are_given_up_make_room_for_others(opening) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/"

        async def act() -> None:
            async with BoundedClient(60.0) as client:
                given_up = [asyncio.create_task(client.post(address)) for _ in range(REQUESTS)]
                while not opening:
                    await asyncio.sleep(0)
                for task in given_up:
                    task.cancel()
                await asyncio.gather(*given_up, return_exceptions=True)
                ended = await asyncio.gather(*(client.post(address) for _ in range(REQUESTS)), return_exceptions=True)
            assert {type(each) for each in ended} == {httpx.ConnectError}

        asyncio.run(asyncio.wait_for(act(), 60))
    assert max(opening) == CONNECTING


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_the_body_of_a_redirect_is_bounded(encoding: str) -> None:
    sent = 0

    async def redirect(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse(status=307, headers={"Location": "/other", "Content-Encoding": encoding})
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                await answer.write(b"x" * (1 << 20))
                sent += 1
        return answer

    async def act() -> None:
        application = web.Application()
        application.router.add_post("/", redirect)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with BoundedClient(60.0, follow_redirects=True) as client:
            with pytest.raises(AnswerError):
                await client.post(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        await runner.cleanup()

    asyncio.run(act())
    assert sent < 100
