"""What becomes of lost workers: those of a generator are told of to the scheduler, who has them started again.

Whatever else is under way on their executor comes to its end first, so that the scheduler hears of one loss, and of
nothing behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from dagrl.plan.schedule.commands import Command, Run, WorkerLost
from dagrl.runtime.errors import WorkerHungError, WorkerLostError
from dagrl.runtime.fleet.fleet import Fleet
from dagrl.runtime.fleet.health import Restarts


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
        self._ended: dict[str, list[Command]] = {}
        """Executor with a loss that the scheduler has not heard of -> commands that it has ended."""

    async def settle(
        self, failure: WorkerLostError, command: Command, note: Callable[[str], None]
    ) -> WorkerLost | None:
        """What to tell the scheduler of a loss that has ended `command`; None where another command's end tells it.

        Raises the failure where the run cannot go on without those workers, or has been restarted often enough.
        """
        executors = {name.rpartition("/")[0] for name in failure.lost}
        if len(executors) != 1 or not self._fleet.may_lose(*executors):
            raise failure
        (executor,) = executors
        self._fleet.lose(failure.lost)
        if executor in self._ended:
            self._ended[executor].append(command)
            return None
        note(self._restarts.once_more(failure, f"{executor} goes on when {', '.join(failure.lost)} is started again"))
        self._ended[executor] = [command]
        await self._others_end(executor)
        return WorkerLost(executor, tuple(each for each in self._ended.pop(executor) if isinstance(each, Run)))

    async def _others_end(self, executor: str) -> None:
        mine = asyncio.current_task()
        others = {task for task, each in self._under_way.items() if executor in self._workers_of(each)} - {mine}
        if others and (await asyncio.wait(others, timeout=self._bound_s))[1]:
            what = ", ".join(str(self._under_way[task]) for task in others if not task.done())
            raise WorkerHungError(f"waited {self._bound_s:g} s for {what} to end, as {executor} has lost workers")
