"""Runs an inference server: the thread with its event loop, and the processes that it starts.

Every wait has a timeout, and a process that dies ends all waits with the reason from its log.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

import psutil

from dagrl.backends.serving.client import ServerError, ServerLostError
from dagrl.backends.serving.server_logs import ServerLogs

_WATCH_S = 0.5
_REPORT_S = 3.0
"""Time for the library to report itself that a process has ended during the start."""
_POLL_S = 0.1
_SHUT_DOWN_S = 3.0
"""Timeout for the library to learn that its processes are about to end; its loop may be blocked."""
_END_S = 10.0
"""Timeout for processes, and then for the loop, to end."""


class RunningServer(ABC):
    """One server, or its processes on one machine. A subclass calls `_start` at the end of its constructor."""

    def __init__(self, title: str, logs: ServerLogs) -> None:
        self._title, self._logs = title, logs
        self.engine: Any
        """The library's engine object; use it only on its own loop."""
        self._loop: asyncio.AbstractEventLoop
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._failure: ServerError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        """Tasks to cancel when the server dies or is closed."""
        self._is_given_up = False
        """Whether processes that start later are ended at once."""
        self._thread = threading.Thread(target=self._live, name=title, daemon=True)

    # -- parts that depend on the library

    @abstractmethod
    def _build(self) -> tuple[Any, asyncio.AbstractEventLoop]:
        """Start the library's engine, and return it with its loop. Runs on the server's thread."""

    @abstractmethod
    def _cause(self, failure: BaseException) -> str:
        """Describe in one sentence a `failure` that `_build` has raised."""

    @abstractmethod
    def _dead_process(self) -> str | None:
        """A description of a dead process of the server; None if all live."""

    @abstractmethod
    def _own_processes(self) -> list[psutil.Process]:
        """The server's processes."""

    @abstractmethod
    async def _shut_down(self) -> None:
        """Tell the engine that its processes are about to end."""

    # -- waits

    def run[Result](self, coroutine: Coroutine[Any, Any, Result], what: str, timeout_s: float) -> Result:
        """Run a coroutine on the server's loop and wait for it. Raises ServerError on timeout."""
        future = self.submit(coroutine)
        done, _ = concurrent.futures.wait([future], timeout=timeout_s)
        if not done:
            future.cancel()
            raise ServerLostError(f"waited {timeout_s:g} s for {self._title} to {what}{self._logs.failure_text()}")
        return future.result()

    def submit[Result](self, coroutine: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Start a coroutine on the server's loop. It ends with ServerError if the server dies."""
        return asyncio.run_coroutine_threadsafe(self._while_it_lives(coroutine), self._loop)

    def check(self) -> None:
        """Raise ServerError if the server has died."""
        if self._failure is not None:
            raise self._failure

    async def _while_it_lives[Result](self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            self.check()
            return await coroutine
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            coroutine.close()
            self._tasks.discard(task)

    def _lost(self, how: str = "") -> ServerError:
        if self._failure is None:
            how = how and f" ({how})"
            self._failure = ServerLostError(f"a process of {self._title} has died{how}{self._logs.failure_text()}")
        return self._failure

    async def _watch(self) -> None:
        """Cancel all waits when a process has died."""
        while self._failure is None:
            await asyncio.sleep(_WATCH_S)
            if (how := self._dead_process()) is not None:
                self._lost(how)
        for task in self._tasks:
            task.cancel()

    # -- start and end

    def _start(self, timeout_s: float, circumstances: str = "") -> None:
        """Raises ServerError with the cause and the `circumstances` if the server does not start in time."""
        self._thread.start()
        why = self._await_start(timeout_s)
        if why is not None:
            message = f"{self._title} {why}{circumstances}{self._logs.failure_text()}"
            self._end_processes()
            raise ServerError(message) from self._start_failure()
        asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def _live(self) -> None:
        try:
            self.engine, self._loop = self._build()
        except BaseException as failure:  # noqa: BLE001
            # SGLang and vLLM may raise anything here, SystemExit included. `_start` raises it in the waiting thread.
            self._started.set_exception(failure)
            return
        self._started.set_result(None)
        if self._is_given_up:
            self._end_processes()
        else:
            self._loop.run_forever()

    def _await_start(self, timeout_s: float) -> str | None:
        """Wait until it has started; returns the reason if it has not. A library may wait long for a dead process."""
        ends = time.monotonic() + timeout_s
        dead: str | None = None
        while dead is None and not self._started.done():
            left = ends - time.monotonic()
            if left <= 0:
                return f"was not ready after {timeout_s:g} s"
            dead = self._dead_process()
            concurrent.futures.wait([self._started], timeout=_REPORT_S if dead else min(left, _WATCH_S))
        failure = self._start_failure()
        if failure is not None:
            return f"did not start: {self._cause(failure)}"
        return None if dead is None else f"did not start: its process {dead or 'has ended'}"

    def _start_failure(self) -> BaseException | None:
        return self._started.exception() if self._started.done() else None

    def close(self) -> None:
        """Stop the server, and wait for its processes and its loop; may be called again."""
        if self._thread.is_alive():
            self._failure = self._failure or ServerError(f"{self._title} is closed")
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(_SHUT_DOWN_S)
            self._end_processes()
            asyncio.run_coroutine_threadsafe(self._wind_up(), self._loop)
            self._thread.join(timeout=_END_S)

    def _end_processes(self) -> None:
        """Kill the processes and wait for them, which frees their GPU memory."""
        self._is_given_up = True
        processes = self._own_processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        ends = time.monotonic() + _END_S
        # Multiprocessing must reap its own processes: a process reaped by another call stays alive for it.
        started = {process.pid: process for process in multiprocessing.active_children()}
        for process in processes:
            if process.pid in started:
                started[process.pid].join(timeout=_END_S)
        # Zombies hold no memory, and zombies that are not children of this process may stay.
        while any(map(is_alive, psutil.wait_procs(processes, timeout=_POLL_S)[1])) and time.monotonic() < ends:
            pass
        # Reap processes that have become zombies since.
        psutil.wait_procs(processes, timeout=0)

    async def _wind_up(self) -> None:
        """Cancel all tasks on the loop, including the library's, and stop it."""
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        # asyncio.wait rejects an empty set; a further machine of a server has no tasks of the library.
        if waiting:
            await asyncio.wait(waiting, timeout=_END_S)
        self._loop.stop()


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def how_it_ended(exit_code: int) -> str:
    """For example ``was ended by SIGKILL``."""
    if exit_code >= 0:
        return f"has ended with {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        # Python names few of the real-time signals.
        return f"was ended by signal {-exit_code}"
