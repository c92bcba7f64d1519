"""Servers on the CPU that do not answer, or are dead. The last module: it ends the servers."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
from completions import GREEDY, LONG, complete, scored

from dagrl.backends.base import GenerationRequest
from dagrl.backends.serving.client import ServerError, ServerLostError

pytestmark = pytest.mark.slow


def test_a_silent_server_is_waited_for_until_the_timeout(server, server_backend, requests, monkeypatch) -> None:
    process = engine_process(server_backend)
    with monkeypatch.context() as patch:
        patch.setattr("dagrl.backends.serving.engine._POLL_S", 0.1)
        patch.setattr(server, "_timeout_s", 1.0)
        process.suspend()
        try:
            with pytest.raises(ServerLostError, match="the server has not responded for 1 s"):
                complete(server, requests, GREEDY)
            with pytest.raises(ServerLostError, match="the server has not responded for 1 s"):
                server.start_generating(requests, GREEDY, lambda _: None).result(timeout=120)
            with pytest.raises(ServerLostError, match="the server has not responded for 1 s"):
                scored(server, [([3, 4], [5])])
        finally:
            process.resume()
    assert complete(server, requests, GREEDY)[0].finish_reason != "abort"
    assert len(scored(server, [([3, 4], [5])])[0]) == 1


def test_a_start_that_takes_too_long_is_given_up(server, server_backend, start_engine, tmp_path) -> None:
    running = processes(server_backend)
    before = set(threading.enumerate())
    with pytest.raises(ServerError, match=r" server generator/0 was not ready after 0\.01 s"):
        start_engine(tmp_path, start_timeout_s=0.01)
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=240)
    assert processes(server_backend) == running, "what was started is gone"


def test_a_server_that_dies_ends_what_waits_for_it(server, server_backend, engines, requests) -> None:
    failed: list[BaseException] = []
    started = server.start_generating(requests, LONG, lambda _: None)
    thread = threading.Thread(target=lambda: failed.append(_failure(server, requests)))
    thread.start()
    os.kill(engine_process(server_backend).pid, signal.SIGKILL)
    thread.join(timeout=120)
    dead = r"a process of \w+ server generator/0 has died"
    assert re.match(dead, str(failed[0])) and re.match(dead, str(started.exception(timeout=120)))
    with pytest.raises(ServerError, match=dead):
        complete(server, requests, GREEDY)
    with pytest.raises(ServerError, match=dead):
        scored(server, [([3, 4], [5])])
    engines.discard(server_backend)
    assert not processes(server_backend)


def processes(backend: str) -> list[psutil.Process]:
    """The processes of a backend's servers, also dead ones."""
    name = {"sglang": "sglang", "vllm": "VLLM"}[backend]
    return [each for each in psutil.Process().children() if each.name().startswith(name)]


def engine_process(backend: str) -> psutil.Process:
    """The one that computes."""
    (process,) = processes(backend)
    return process


def _failure(server: Any, requests: Sequence[GenerationRequest]) -> BaseException:
    with pytest.raises(ServerError) as caught:
        complete(server, requests, LONG)
    return caught.value
