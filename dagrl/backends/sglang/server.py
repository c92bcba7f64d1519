"""A server: SGLang's engine object on a thread with its event loop, and its processes.

SGLang's processes are killed by the kernel when the thread that started them ends. So one thread builds the engine and
runs its loop until the end; others submit coroutines. Every wait has a timeout, and a dead process ends all waits with
its last output.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import faulthandler
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from dagrl.backends.serving.client import ServerError, ServerLostError
from dagrl.backends.serving.server_logs import ServerLogs
from dagrl.backends.serving.server_loop import ServerLoop
from dagrl.backends.sglang.layout import FUSED
from dagrl.backends.sglang.processes import keep_code_out, run_scheduler, without_megatron
from dagrl.imports import UNUSED, import_transformers, without_packages

_WATCH_S = 0.5
_STACKS = "-stacks.log"
"""Suffix of the file with the worker's thread stacks at the time a process failed."""
_END_S = 10.0
"""Timeout for the loop to stop after its processes have ended."""


class ServerProcess(ServerLoop):
    """SGLang on one machine."""

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        log_prefix: Path,
        start_timeout_s: float,
        circumstances: str = "",
    ) -> None:
        """Start it with ServerArgs' `arguments`; its processes log to files that begin with `log_prefix`.

        Raises ServerError with the cause and the `circumstances` if it does not start in time.
        """
        super().__init__(f"SGLang server {name}")
        self._arguments = dict(arguments)
        self._fused_sampler = self._arguments.get("sampling_backend") == FUSED
        if self._fused_sampler:
            del self._arguments["sampling_backend"]
        self._log_prefix = log_prefix
        self._processes: list[Any] = []
        self._given_up = False
        """Whether the start was abandoned: processes started later are killed at once."""
        self._started: concurrent.futures.Future[Any] = concurrent.futures.Future()
        log_prefix.parent.mkdir(parents=True, exist_ok=True)
        # The dash separates server 1 from server 10.
        self._logs = ServerLogs(log_prefix.parent, f"{log_prefix.name}-*tp*.log")
        # A failing process sends its parent this signal, which would end the worker without a message. Unlike a Python
        # handler, this can be set from any thread. It is never reset, because the signal may come late.
        self._stacks = log_prefix.with_name(f"{log_prefix.name}{_STACKS}").open("a")
        faulthandler.register(signal.SIGQUIT, file=self._stacks, chain=False)
        self._thread = threading.Thread(target=self._live, name=f"sglang {name}", daemon=True)
        self._thread.start()
        self.engine: Any = self._await_start(start_timeout_s, circumstances)
        """SGLang's engine object; use it only on its own loop."""
        self._loop = self.engine.loop
        asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def _last_words(self) -> str:
        return self._logs.last_words()

    def silent_s(self, since: float) -> float:
        """Seconds without any message from the server, which sends some while it generates; at most those `since`."""
        return time.time() - max(since, self.engine.tokenizer_manager.last_receive_tstamp)

    def close(self) -> None:
        """Stop its processes and its loop, and wait for both; may be called again."""
        if self._thread.is_alive():
            self._failure = self._failure or ServerError(f"{self._title} is closed")
            if self.engine.tokenizer_manager is not None:
                # The watchdog would report a crash.
                self.engine.tokenizer_manager._subprocess_watchdog.stop()
            self._end_processes()
            asyncio.run_coroutine_threadsafe(self._wind_up(), self._loop)
            self._thread.join(timeout=_END_S)

    # -- on the server's thread

    def _live(self) -> None:
        try:
            # For a model that sees, it imports all models of SGLang, the debugging tool among them.
            with without_megatron():
                kind = _engine_class(self._log_prefix, self._fused_sampler, self._note_processes)
                keep_code_out(trusted=self._arguments.get("trust_remote_code", False))
                engine = kind(**self._arguments)
        except BaseException as failure:  # noqa: BLE001 - raised in the thread that waits for the start
            self._started.set_exception(failure)
            return
        self._started.set_result(engine)
        engine.loop.run_forever()

    async def _watch(self) -> None:
        """Cancel all waits when a process has died."""
        while self._failure is None:
            await asyncio.sleep(_WATCH_S)
            for process in self._processes:
                if not process.is_alive() and self._failure is None:
                    how = f"exit code {process.exitcode}"
                    self._failure = ServerLostError(f"a process of {self._title} has died ({how}){self._last_words()}")
        for task in self._tasks:
            task.cancel()

    async def _wind_up(self) -> None:
        """Cancel all tasks on the loop, including SGLang's, and stop it."""
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        # asyncio.wait rejects an empty set; a further machine of a server has no tasks of SGLang's.
        if waiting:
            await asyncio.wait(waiting, timeout=_END_S)
        self.engine.loop.stop()

    # -- start and stop

    def _await_start(self, timeout_s: float, circumstances: str) -> Any:
        done, _ = concurrent.futures.wait([self._started], timeout=timeout_s)
        failure = self._started.exception() if done else None
        if done and failure is None:
            return self._started.result()
        what = f"did not start: {_first_line(failure)}" if failure else f"was not ready after {timeout_s:g} s"
        message = f"{self._title} {what}{circumstances}{self._last_words()}"
        self._end_processes()
        raise ServerError(message) from failure

    def _note_processes(self, started: Sequence[Any]) -> None:
        self._processes.extend(started)
        if self._given_up:
            self._end_processes()

    def _end_processes(self) -> None:
        """Kill the processes and wait for them, which frees their GPU memory."""
        self._given_up = True
        # The process ID of an ended process may have been reused.
        for process in filter(lambda each: each.is_alive(), self._processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                for each in [*parent.children(recursive=True), parent]:
                    each.kill()
        for process in self._processes:
            process.join(timeout=_END_S)


def _engine_class(log_prefix: Path, fused_sampler: bool, note_processes: Callable[[Sequence[Any]], None]) -> Any:
    """SGLang's Engine class, changed to log to files and to report its processes."""
    import_transformers()
    with without_megatron(), without_packages(*UNUSED):
        from sglang.srt.entrypoints.engine import Engine

    class _Engine(Engine):
        run_scheduler_process_func = staticmethod(partial(run_scheduler, log_prefix, fused_sampler))

        @classmethod
        def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
            result, started = super()._launch_scheduler_processes(*args, **kwargs)
            note_processes(started)
            return result, started

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> Any:
            # No detokenizer: it takes a GiB, and is not used with token ids.
            return [], []

    return _Engine


def _first_line(failure: BaseException) -> str:
    text = str(failure).strip().partition("\n")[0]
    return text if isinstance(failure, ValueError) and text else f"{type(failure).__name__}: {text}"
