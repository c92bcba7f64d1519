"""Connections of agents are not opened all at once."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from dagrl.ops.agents.client_transport import open_session


def test_few_connections_are_opened_at_a_time_and_any_number_is_open(monkeypatch) -> None:
    opening, most = 0, 0
    create = aiohttp.TCPConnector._create_connection

    async def counted(self, *args, **options):
        nonlocal opening, most
        opening += 1
        most = max(most, opening)
        try:
            await asyncio.sleep(0)
            return await create(self, *args, **options)
        finally:
            opening -= 1

    monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", counted)

    async def act() -> None:
        working, all_there = 0, asyncio.Event()

        async def answer(_: web.Request) -> web.Response:
            nonlocal working
            working += 1
            if working == 20:
                all_there.set()
            await all_there.wait()
            return web.json_response({})

        application = web.Application()
        application.router.add_post("/", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        session = open_session()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with asyncio.timeout(60):
            replies = await asyncio.gather(*(session.post(address) for _ in range(20)))
        assert all(reply.status == 200 for reply in replies)
        await session.close()
        await runner.cleanup()

    asyncio.run(act())
    assert most == 4
