"""A server: vLLM's AsyncLLM on a thread with its event loop, and its processes."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from pydantic import ValidationError

from dagrl.backends.serving.running_server import RunningServer, how_it_ended, is_alive
from dagrl.backends.serving.server_logs import ServerLogs
from dagrl.backends.vllm.versions import keep_routes

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm.v1.engine.async_llm import AsyncLLM

_CORE_FAILED = "Engine core initialization failed"
"""Beginning of vLLM's message about an engine core that ended during the start."""


class VllmServer(RunningServer):
    """vLLM in this worker, with the processes that it starts."""

    def __init__(self, name: str, arguments: Mapping[str, object], log: Path, start_timeout_s: float) -> None:
        """Start it with AsyncEngineArgs' `arguments`; its processes write to `log`.

        Raises ServerError with the cause if it does not start in time.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(f"vLLM server {name}", ServerLogs(log.parent, log.name))
        self._arguments, self._log = dict(arguments), log
        self._others = set(_children())
        """Processes that do not belong to this server."""
        self._cores: set[BaseProcess] = set()
        """Engine cores, which compute: the processes that vLLM starts through multiprocessing."""
        self._other_cores = set(multiprocessing.active_children())
        self._watched: list[psutil.Process] = []
        """All processes of a server that has started."""
        self._start(start_timeout_s)

    def _build(self) -> tuple[AsyncLLM, asyncio.AbstractEventLoop]:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        # Before there are processes to watch, as the watch also reads its state.
        self.engine = loop.run_until_complete(self._build_engine())
        self._watched = self._own_processes()
        return self.engine, loop

    async def _build_engine(self) -> AsyncLLM | None:
        with _output_to(self._log):
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

            if self._is_given_up:
                return None
            keep_routes()
            # The defaults for batches: 16384 tokens at once instead of 2048, on an H200.
            batches = UsageContext.LLM_CLASS
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments), usage_context=batches)
        if self._is_given_up:
            engine.shutdown()
        return engine

    def _cause(self, failure: BaseException) -> str:
        if isinstance(failure, ValidationError):
            # pydantic, which checks vLLM's arguments, adds its whole input.
            return "; ".join(error["msg"] for error in failure.errors())
        if not str(failure).startswith(_CORE_FAILED):
            # vLLM ends its cores after such a failure, too.
            return str(failure)
        dead = self._dead_process()
        return f"its process {dead}" if dead else "its engine core has ended"

    def _dead_process(self) -> str | None:
        """See `RunningServer`. vLLM itself watches an engine core only until the core is ready."""
        if not self._watched:
            self._cores |= set(multiprocessing.active_children()) - self._other_cores
        for core in self._cores:
            if core.exitcode is not None:
                return f"{core.name} {how_it_ended(core.exitcode)}"
        is_lost = self._watched and (self.engine.errored or not all(map(is_alive, self._watched)))
        return "" if is_lost else None

    async def _while_it_lives[Result](self, coroutine: Coroutine[object, None, Result]) -> Result:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await super()._while_it_lives(coroutine)
        except EngineDeadError as error:
            raise self._lost() from error

    async def _shut_down(self) -> None:
        self.engine.shutdown()

    def _own_processes(self) -> list[psutil.Process]:
        return [child for child in _children() if child not in self._others]


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Context in which this process and its children write their output to a file."""
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
