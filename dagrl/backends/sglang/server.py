"""A server: SGLang's engine object on a thread with its event loop, and its processes.

SGLang's processes are killed by the kernel when the thread that started them ends. So one thread builds the engine and
runs its loop until the end; others submit coroutines.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from dagrl.backends.serving.running_server import RunningServer, how_it_ended
from dagrl.backends.serving.server_logs import ServerLogs
from dagrl.backends.sglang.layout import FUSED
from dagrl.backends.sglang.processes import keep_code_out, run_scheduler, without_megatron
from dagrl.imports import UNUSED, import_transformers, without_packages

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from sglang.srt.entrypoints.engine import Engine


class SglangServer(RunningServer):
    """SGLang on one machine."""

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, object],
        log_prefix: Path,
        start_timeout_s: float,
        circumstances: str = "",
    ) -> None:
        """Start it with ServerArgs' `arguments`; its processes log to files that begin with `log_prefix`.

        Raises ServerError with the cause and the `circumstances` if it does not start in time.
        """
        log_prefix.parent.mkdir(parents=True, exist_ok=True)
        # The dash separates server 1 from server 10.
        super().__init__(f"SGLang server {name}", ServerLogs(log_prefix.parent, f"{log_prefix.name}-*tp*.log"))
        self._arguments = dict(arguments)
        self._fused_sampler = self._arguments.get("sampling_backend") == FUSED
        if self._fused_sampler:
            del self._arguments["sampling_backend"]
        self._log_prefix = log_prefix
        self._processes: list[BaseProcess] = []
        # A failing process sends its parent this signal, which would end the worker without a message. Unlike a Python
        # handler, this can be set from any thread. It is never reset, because the signal may come late. The file gets
        # the stacks of the worker's threads.
        self._stacks = log_prefix.with_name(f"{log_prefix.name}-stacks.log").open("a")
        faulthandler.register(signal.SIGQUIT, file=self._stacks, chain=False)
        self._start(start_timeout_s, circumstances)

    def _build(self) -> tuple[Engine, asyncio.AbstractEventLoop]:
        # For a vision model, it imports all models of SGLang, including the debugging tool.
        with without_megatron():
            kind = _engine_class(self._log_prefix, self._fused_sampler, self._note_processes)
            keep_code_out(trusted=bool(self._arguments.get("trust_remote_code")))
            engine = kind(**self._arguments)
        return engine, engine.loop

    def _cause(self, failure: BaseException) -> str:
        text = str(failure).strip().partition("\n")[0]
        return text if isinstance(failure, ValueError) and text else f"{type(failure).__name__}: {text}"

    def _dead_process(self) -> str | None:
        ends = ((process.pid, process.exitcode) for process in self._processes)
        return next((f"{pid} {how_it_ended(code)}" for pid, code in ends if code is not None), None)

    def _note_processes(self, started: Sequence[BaseProcess]) -> None:
        self._processes.extend(started)
        if self._is_given_up:
            self._end_processes()

    def _own_processes(self) -> list[psutil.Process]:
        processes: list[psutil.Process] = []
        for process in filter(lambda process: process.is_alive(), self._processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                processes += [*parent.children(recursive=True), parent]
        return processes

    def _end_processes(self) -> None:
        super()._end_processes()
        # Their ids may be used again.
        self._processes.clear()

    async def _shut_down(self) -> None:
        if self.engine.tokenizer_manager is not None:
            # The watchdog would report a crash.
            self.engine.tokenizer_manager._subprocess_watchdog.stop()


def _engine_class(
    log_prefix: Path, fused_sampler: bool, note_processes: Callable[[Sequence[BaseProcess]], None]
) -> type[Engine]:
    """SGLang's Engine class, changed to log to files and to report its processes."""
    import_transformers()
    with without_megatron(), without_packages(*UNUSED):
        from sglang.srt.entrypoints.engine import Engine

    class _Engine(Engine):
        run_scheduler_process_func = staticmethod(partial(run_scheduler, log_prefix, fused_sampler))

        @classmethod
        def _launch_scheduler_processes(cls, *args: object, **kwargs: object) -> tuple[object, list[BaseProcess]]:
            result, started = super()._launch_scheduler_processes(*args, **kwargs)
            note_processes(started)
            return result, started

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *args: object, **kwargs: object) -> tuple[object, list[BaseProcess]]:
            # No detokenizer: it takes a GiB, and is not used with token ids.
            return [], []

    return _Engine
