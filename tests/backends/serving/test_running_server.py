"""A server's thread and its waits, with a library that has no processes."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest

from dagrl.backends.base import GenerationRequest
from dagrl.backends.serving import engine as serving_engine
from dagrl.backends.serving.client import ServerLostError
from dagrl.backends.serving.engine import ServerEngine
from dagrl.backends.serving.running_server import RunningServer, how_it_ended
from dagrl.backends.serving.server_logs import ServerLogs
from dagrl.config.schema import SamplingSpec


class Server(RunningServer):
    """A loop on a thread."""

    def __init__(self, folder: Path) -> None:
        super().__init__("server generator/0", ServerLogs(folder, "*.log"))
        self._start(5.0)

    def _build(self) -> tuple[Any, asyncio.AbstractEventLoop]:
        return object(), asyncio.new_event_loop()

    def _cause(self, failure: BaseException) -> str:
        return str(failure)

    def _dead_process(self) -> str | None:
        return None

    def _own_processes(self) -> list[psutil.Process]:
        return []

    async def _shut_down(self) -> None:
        pass


class Responses:
    """A reader whose requests never end."""

    born = 0

    async def sample(self, *_: object) -> None:
        await asyncio.Event().wait()


class Client:
    heard = 0.0


class Engine(ServerEngine):
    """An engine of `Server`, without a model."""

    kinds: ClassVar = {}
    more_room = ""

    def __init__(self, server: Server) -> None:
        self._server, self._client, self._responses, self._timeout_s = server, Client(), Responses(), 0.2

    def _start(self, *_: object) -> Any:
        raise NotImplementedError

    def _check(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path)
    yield running
    running.close()


@pytest.mark.parametrize("is_blocked", [False, True])
def test_requests_end_when_the_server_is_silent_even_if_its_loop_is_blocked(server, monkeypatch, is_blocked):
    monkeypatch.setattr(serving_engine, "_POLL_S", 0.05)
    ends = threading.Event()
    if is_blocked:
        server._loop.call_soon_threadsafe(ends.wait, 20.0)
    try:
        with pytest.raises(ServerLostError, match=r"has not responded for 0\.2 s"):
            list(Engine(server).generate([GenerationRequest(np.array([1]), 0)], SamplingSpec(max_new_tokens=2)))
    finally:
        ends.set()


def test_a_request_to_a_dead_server_leaves_no_coroutine_behind(server, recwarn):
    failure = server._lost("was ended by SIGKILL")
    with pytest.raises(ServerLostError, match="was ended by SIGKILL"):
        list(Engine(server).generate([GenerationRequest(np.array([1]), 0)], SamplingSpec(max_new_tokens=2)))
    # Its frames hold what the request has left.
    failure.__traceback__ = None
    gc.collect()
    assert [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)] == []


@pytest.mark.parametrize(
    ("exit_code", "expected"), [(1, "has ended with 1"), (-9, "was ended by SIGKILL"), (-40, "was ended by signal 40")]
)
def test_the_end_of_a_process_is_in_words(exit_code, expected):
    assert how_it_ended(exit_code) == expected
