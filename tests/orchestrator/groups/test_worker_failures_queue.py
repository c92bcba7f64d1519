"""The error of a failed run that was queued behind another one."""

from __future__ import annotations

import asyncio

import pytest

from dagrl.config.coordinates import Coordinates
from dagrl.config.schema import Scope
from dagrl.orchestrator.groups.worker_failures import wait_for_earlier_runs
from dagrl.scheduler.commands import Command, Run
from dagrl.scheduler.plan import HOST, Executor, Plan, PlannedTask, Rows
from dagrl.workers.errors import RunError

RANK = (Coordinates(0, 0, 0, 0, primary=True),)
PLAN = Plan(
    {HOST: Executor(HOST, None, RANK), "actor": Executor("actor", "train", RANK, trained=True)},
    tuple(
        PlannedTask(name, name, name, executor, Scope.ROW, Rows.TRAIN)
        for name, executor in (("reward", HOST), ("advantage", HOST), ("ref", "actor"), ("update", "actor"))
    ),
    shards=1,
    steps=1,
)
AHEAD = "out of memory"


def told_of(second: str, *, first: str = "ref", fails: bool = True) -> str:
    """The error of `second`, queued behind `first`, which fails before `first` ends."""
    under_way: dict[asyncio.Task[object], Command] = {}

    async def one_ahead() -> None:
        await asyncio.sleep(0.02)
        if fails:
            raise RunError(AHEAD)

    async def behind() -> None:
        try:
            raise RunError("blocks that never came")
        except RunError:
            await wait_for_earlier_runs(PLAN.task(second).executor, PLAN, under_way)
            raise

    async def both() -> str:
        for name, coroutine in ((first, one_ahead()), (second, behind())):
            task = asyncio.get_running_loop().create_task(coroutine)
            under_way[task] = Run(1, name, (0,))
        told = await asyncio.gather(*under_way, return_exceptions=True)
        return str(told[1])

    return asyncio.run(both())


@pytest.mark.parametrize(
    ("first", "second", "fails", "said"),
    [
        ("ref", "update", True, AHEAD),
        ("ref", "update", False, "blocks that never came"),
        ("reward", "advantage", True, "blocks that never came"),
        ("reward", "update", True, "blocks that never came"),
    ],
    ids=["of the one ahead", "its own, where that is well", "on the host", "of other workers"],
)
def test_a_queued_run_fails_with_the_failure_of_the_run_before(first, second, fails, said):
    assert told_of(second, first=first, fails=fails) == said
