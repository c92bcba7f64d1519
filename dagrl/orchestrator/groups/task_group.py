"""Concurrent coroutines: they all succeed, or the most specific failure ends all of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from dagrl.workers.errors import RunError, WorkerDiedError, WorkerLostError

_QUIET_S = 10.0
"""How long `run_with_notes` waits before its first note."""
_SECOND_FAILURE_S = 2.0
"""How long to wait for a more specific failure: if a worker dies, the others report lost connections."""


class TaskGroup:
    """Coroutines that run concurrently. More may be started at any time."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._ended: asyncio.Queue[asyncio.Task[object]] = asyncio.Queue()

    def start[Result](self, coroutine: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended.put_nowait)
        return task

    async def join(self) -> None:
        """Wait for all coroutines. Raises the most specific failure and cancels the others."""
        try:
            while self._tasks:
                ended = await self._ended.get()
                self._tasks.discard(ended)
                if ended.exception() is not None:
                    raise await self._most_specific(ended)
        finally:
            for task in self._tasks:
                task.cancel()

    async def _most_specific(self, first: asyncio.Task[object]) -> BaseException:
        waits = self._tasks and not isinstance(first.exception(), WorkerDiedError)
        late, _ = await asyncio.wait(self._tasks, timeout=_SECOND_FAILURE_S) if waits else (set(), set())
        failures = [failure for task in (first, *late) if (failure := task.exception()) is not None]
        return min(failures, key=_rank)


def _rank(failure: BaseException) -> int:
    """Order of specificity: a dead worker, a named lost worker, an unnamed lost worker, then everything else."""
    if isinstance(failure, WorkerDiedError):
        return 0
    if isinstance(failure, WorkerLostError):
        return 1 if failure.lost else 2
    return 3


async def run_all[Result](coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results in order. Raises the most specific failure."""
    group = TaskGroup()
    tasks = [group.start(coroutine) for coroutine in coroutines]
    await group.join()
    return [task.result() for task in tasks]


async def run_in_daemon_thread[**P, Result](function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Like `asyncio.to_thread`, but neither the loop nor the process waits for the thread when it ends.

    For calls that may never return, such as on a network file system that hangs.
    """
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()
    # The thread continues when the coroutine is cancelled.
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as failure:  # noqa: BLE001 - raised again by the awaiting coroutine
            future.set_exception(failure)

    threading.Thread(target=work, name=f"daemon {getattr(function, '__name__', '')}", daemon=True).start()
    return await asyncio.wrap_future(future)


async def run_with_notes[Result](
    function: Callable[[], Result],
    what: Callable[[], str],
    note: Callable[[str], None],
    limit_s: float,
    *,
    node: str = "",
) -> Result:
    """`run_in_daemon_thread`, with a note of how long `what` takes after 10 s, 20 s, 40 s and so on.

    Raises RunError after `limit_s`. The thread continues.
    """
    call = asyncio.ensure_future(run_in_daemon_thread(function))
    began, due = time.monotonic(), _QUIET_S
    try:
        while True:
            passed = time.monotonic() - began
            if (await asyncio.wait([call], timeout=max(0.0, min(due, limit_s) - passed)))[0]:
                return call.result()
            if due >= limit_s:
                message = f"{what()} has not returned for {limit_s:g} s"
                raise RunError(message, hint="raise run.node_timeout_s to wait longer", node=node)
            note(f"{f'{node}: ' if node else ''}{what()} has not returned for {due:g} s")
            due *= 2
    finally:
        call.cancel()
