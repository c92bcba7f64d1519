"""What becomes of lost workers: those of a generator are told of to the scheduler, who has them started again.

Whatever else is under way on their executor comes to its end first, so that the scheduler hears of one loss, and of
nothing behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from dagrl.scheduler.commands import Command, WorkerLost
from dagrl.workers.errors import WorkerHungError, WorkerLostError
from dagrl.workers.groups.restart_policy import Restarts
from dagrl.workers.groups.worker_group import Fleet


class Losses:
    """The losses of a run."""

    def __init__(
        self,
        fleet: Fleet,
        restarts: Restarts,
        bound_s: float,
        under_way: Mapping[asyncio.Task[object], Command],
        workers_of: Callable[[Command], tuple[str, ...]],
    ) -> None:
        """`under_way`: the commands that are being carried out; `workers_of`: their executors."""
        self._fleet, self._restarts, self._bound_s = fleet, restarts, bound_s
        self._under_way, self._workers_of = under_way, workers_of
        self._untold: set[str] = set()
        """Executors with a loss that the scheduler has not heard of."""

    async def settle(self, failure: WorkerLostError, note: Callable[[str], None]) -> WorkerLost | None:
        """What to tell the scheduler of a loss that has ended a command; None where another command's end tells it.

        Raises the failure where the run cannot go on without those workers, or has been restarted often enough.
        """
        executors = {name.rpartition("/")[0] for name in failure.lost}
        if len(executors) != 1 or not self._fleet.may_lose(*executors):
            raise failure
        (executor,) = executors
        self._fleet.lose(failure.lost)
        if executor in self._untold:
            return None
        note(self._restarts.once_more(failure, f"{executor} goes on when {', '.join(failure.lost)} is started again"))
        self._untold.add(executor)
        await self._others_end(executor)
        self._untold.remove(executor)
        return WorkerLost(executor)

    async def _others_end(self, executor: str) -> None:
        mine = asyncio.current_task()
        others = {task for task, each in self._under_way.items() if executor in self._workers_of(each)} - {mine}
        if others and (await asyncio.wait(others, timeout=self._bound_s))[1]:
            what = ", ".join(str(self._under_way[task]) for task in others if not task.done())
            raise WorkerHungError(f"waited {self._bound_s:g} s for {what} to end, as {executor} has lost workers")
