"""A server: vLLM's AsyncLLM on a thread with its event loop, and its processes.

Every wait has a timeout, and a dead process ends all waits with the last lines of the log.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from dagrl.backends.serving.client import ServerError, ServerLostError
from dagrl.backends.serving.server_logs import ServerLogs
from dagrl.backends.serving.server_loop import ServerLoop
from dagrl.backends.vllm.outputs import keep_routes

_WATCH_S = 0.5
_END_S = 10.0
_RAISE_S = 3.0
"""How long vLLM may take to report itself that a process has ended."""
_CORE_FAILED = "Engine core initialization failed"
"""Beginning of vLLM's message about an engine core that ended during the start."""


class VllmServer(ServerLoop):
    """vLLM in this worker, with the processes that it starts."""

    def __init__(self, name: str, arguments: Mapping[str, Any], log: Path, start_timeout_s: float) -> None:
        """Start it with AsyncEngineArgs' `arguments`; its processes write to `log`.

        Raises ServerError with the cause if it does not start in time.
        """
        super().__init__(f"vLLM server {name}")
        self._arguments, self._log = dict(arguments), log
        self._others = set(_children())
        """Processes that are not this server's."""
        self._cores: set[Any] = set()
        """Engine cores, which compute: the processes that vLLM starts through multiprocessing."""
        self._other_cores = set(multiprocessing.active_children())
        self._is_given_up = False
        self._loop = asyncio.new_event_loop()
        self.heard: Callable[[], float] = time.time
        """When the engine sent something last; the client knows."""
        self._started: concurrent.futures.Future[Any] = concurrent.futures.Future()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._logs = ServerLogs(log.parent, log.name)
        self._thread = threading.Thread(target=self._live, name=f"vllm {name}", daemon=True)
        self._thread.start()
        why = self._await_start(start_timeout_s)
        if why is not None:
            self._is_given_up = True
            self._end_processes()
            failure = self._started.exception() if self._started.done() else None
            raise ServerError(f"{self._title} {why}{self._last_words()}") from failure
        self.engine: Any = self._started.result()
        """vLLM's AsyncLLM; use it only on its own loop."""
        self._watching = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def silent_s(self, since: float) -> float:
        """See `RunningServer.silent_s`."""
        return time.time() - max(since, self.heard())

    def close(self) -> None:
        """See `RunningServer.close`."""
        if self._thread.is_alive():
            self._failure = self._failure or ServerError(f"{self._title} is closed")
            with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
                asyncio.run_coroutine_threadsafe(self._wind_up(), self._loop).result(_END_S)
            self._end_processes()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=_END_S)

    def _await_start(self, timeout_s: float) -> str | None:
        """Wait until it has started; returns why it has not.

        vLLM itself watches an engine core only until that says that it is ready, and then waits for ten minutes.
        """
        ends = time.monotonic() + timeout_s
        dead: str | None = None
        while dead is None and not self._started.done():
            left = ends - time.monotonic()
            if left <= 0:
                return f"was not ready after {timeout_s:g} s"
            dead = self._dead_core()
            concurrent.futures.wait([self._started], timeout=min(left, _WATCH_S))
        concurrent.futures.wait([self._started], timeout=_RAISE_S)
        failure = self._started.exception() if self._started.done() else None
        if failure is not None:
            # vLLM ends its cores after any other failure too.
            is_core = str(failure).startswith(_CORE_FAILED)
            return f"did not start: {self._dead_core() or 'its engine core has ended' if is_core else _cause(failure)}"
        return f"did not start: {dead}" if dead is not None else None

    def _dead_core(self) -> str | None:
        """The engine core that has ended, and how."""
        self._cores |= set(multiprocessing.active_children()) - self._other_cores
        for core in self._cores:
            if core.exitcode is not None:
                return f"its process {core.name} {_end_of(core.exitcode)}"
        return None

    # -- on the server's thread

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._start())
        except BaseException as failure:  # noqa: BLE001 - raised in the thread that waits for the start
            self._started.set_exception(failure)
            return
        self._loop.run_forever()

    async def _start(self) -> None:
        with _output_to(self._log):
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

            if self._is_given_up:
                return
            keep_routes()
            # The defaults for batches: 16384 tokens at once instead of 2048, on an H200.
            batches = UsageContext.LLM_CLASS
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments), usage_context=batches)
        if self._is_given_up:
            engine.shutdown()
        self._started.set_result(engine)

    async def _while_it_lives[Result](self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await super()._while_it_lives(coroutine)
        except EngineDeadError as error:
            raise self._lost() from error

    async def _watch(self) -> None:
        """Cancel all waits when a process has died."""
        processes = self._own_processes()
        while self._failure is None:
            await asyncio.sleep(_WATCH_S)
            if self.engine.errored or any(not _is_alive(process) for process in processes):
                self._lost()
        for task in self._tasks:
            task.cancel()

    def _lost(self) -> ServerError:
        self._failure = self._failure or ServerLostError(f"a process of {self._title} has died{self._last_words()}")
        return self._failure

    async def _wind_up(self) -> None:
        self._watching.cancel()
        for task in self._tasks:
            task.cancel()
        self.engine.shutdown()

    def _end_processes(self) -> None:
        """Kill the processes and wait for them, which frees their GPU memory."""
        processes = self._own_processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=_END_S)

    def _own_processes(self) -> list[psutil.Process]:
        return [each for each in _children() if each not in self._others]

    def _last_words(self) -> str:
        return self._logs.last_words()


def _end_of(exit_code: int) -> str:
    return f"was ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"has ended with {exit_code}"


def _cause(failure: BaseException) -> str:
    """In one sentence: pydantic, which checks vLLM's arguments, adds all of its input."""
    if isinstance(failure, ValidationError):
        return "; ".join(each["msg"] for each in failure.errors())
    return str(failure)


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Context in which this process and those that it starts write their output to a file."""
    kept = [os.dup(standard) for standard in (1, 2)]
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        yield
    finally:
        for standard, original in zip((1, 2), kept, strict=True):
            os.dup2(original, standard)
            os.close(original)
        os.close(descriptor)
