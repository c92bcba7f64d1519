"""Waits for coroutines on the event loop of a server's thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

from dagrl.backends.serving.client import ServerError, ServerLostError


class ServerLoop(ABC):
    """Most of a `RunningServer`: every wait has a timeout, and ends when the server dies."""

    _loop: asyncio.AbstractEventLoop
    """The loop of the server's thread; there once it has started."""

    def __init__(self, title: str) -> None:
        """`title` names the server in messages."""
        self._title = title
        self._failure: ServerError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        """Tasks to cancel when the server dies or is closed."""

    @abstractmethod
    def _last_words(self) -> str:
        """The server's last output, for messages."""

    def run[Result](self, coroutine: Coroutine[Any, Any, Result], what: str, timeout_s: float) -> Result:
        """See `RunningServer.run`."""
        future = self.submit(coroutine)
        done, _ = concurrent.futures.wait([future], timeout=timeout_s)
        if not done:
            future.cancel()
            raise ServerLostError(f"waited {timeout_s:g} s for {self._title} to {what}{self._last_words()}")
        return future.result()

    def submit[Result](self, coroutine: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """See `RunningServer.submit`."""
        return asyncio.run_coroutine_threadsafe(self._while_it_lives(coroutine), self._loop)

    def check(self) -> None:
        """See `RunningServer.check`."""
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
