"""Runs that were sent to workers which are at another: where that one fails, so do they, and it says why."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import takewhile

from dagrl.plan.plan import HOST, Plan
from dagrl.plan.schedule.commands import Command, Run


async def raise_failure_ahead(run: Run, plan: Plan, under_way: Mapping[asyncio.Task[object], Command]) -> None:
    """Wait for what `run`, which this task has begun, was sent behind, and raise what that has failed of, if it has.

    `under_way`: the commands that are being carried out, in the order in which they were begun; each has its bound.
    """
    executor = plan.task(run.task).executor
    if executor == HOST:  # where runs are beside each other
        return
    mine = asyncio.current_task()
    for task, command in takewhile(lambda each: each[0] is not mine, list(under_way.items())):
        if isinstance(command, Run) and plan.task(command.task).executor == executor:
            await asyncio.wait([task])
            if not task.cancelled() and (failure := task.exception()):
                raise failure
