"""Coroutines that work on one thing: all of them end well, or the failure that explains the others ends all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from dagrl.workers.errors import WorkerDiedError, WorkerLostError

_SECOND_FAILURE_S = 2.0
"""How long the others may take to fail too: where a worker has died, the others' complaints are its consequence."""


class Crew:
    """Coroutines of which more may come while others run."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Have one more work."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended.put_nowait)
        return task

    async def finish(self) -> None:
        """Wait for all, those that are started meanwhile included; raises a failure: a death before its witnesses."""
        try:
            while self._tasks:
                ended = await self._ended.get()
                self._tasks.discard(ended)
                if ended.exception() is not None:
                    raise await self._explanation(ended)
        finally:
            for task in self._tasks:
                task.cancel()

    async def _explanation(self, first: asyncio.Task[Any]) -> BaseException:
        # Nothing that comes behind a death explains it.
        waits = self._tasks and not isinstance(first.exception(), WorkerDiedError)
        late, _ = await asyncio.wait(self._tasks, timeout=_SECOND_FAILURE_S) if waits else (set(), set())
        failures = [failure for task in (first, *late) if (failure := task.exception()) is not None]
        return min(failures, key=_distance_from_the_cause)


def _distance_from_the_cause(failure: BaseException) -> int:
    """A death explains a loss that says who it is of, that explains what others say who only miss somebody."""
    if isinstance(failure, WorkerDiedError):
        return 0
    if isinstance(failure, WorkerLostError):
        return 1 if failure.lost else 2
    return 3


async def together(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All results in order, or the failure that explains the others."""
    crew = Crew()
    tasks = [crew.start(each) for each in coroutines]
    await crew.finish()
    return [task.result() for task in tasks]
