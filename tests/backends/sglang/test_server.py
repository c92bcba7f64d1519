"""SGLang's server: the end of its loop."""

from __future__ import annotations

import asyncio

from dagrl.backends.sglang.server import SglangServer


def test_a_loop_without_tasks_of_its_own_is_stopped():
    loop = asyncio.new_event_loop()
    server = object.__new__(SglangServer)
    server._loop = loop
    winding_up = loop.create_task(server._wind_up())
    loop.call_later(5.0, loop.stop)
    loop.run_forever()
    loop.close()
    assert winding_up.done() and winding_up.exception() is None
