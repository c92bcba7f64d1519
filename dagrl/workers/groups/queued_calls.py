"""What was sent to workers that are still at a run: where that one fails, so does all behind it, and it says why."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import takewhile

from dagrl.scheduler.commands import Command, Run
from dagrl.scheduler.plan import HOST, Plan


async def runs_ahead_end(executor: str, plan: Plan, under_way: Mapping[asyncio.Task[object], Command]) -> None:
    """Wait for the runs on an executor that were begun before what this task carries out; raises what one failed of.

    `under_way`: the commands that are being carried out, in the order in which they were begun; each has its bound.
    """
    if executor == HOST:  # where runs are beside each other
        return
    mine = asyncio.current_task()
    for task, command in takewhile(lambda each: each[0] is not mine, list(under_way.items())):
        if isinstance(command, Run) and plan.task(command.task).executor == executor:
            await asyncio.wait([task])
            if not task.cancelled() and (failure := task.exception()):
                raise failure
