"""Coroutines that work together: more may come, and the failure that explains the others is the one that is raised."""

from __future__ import annotations

import asyncio
import gc

import pytest

from dagrl.orchestrator.groups.task_group import TaskGroup, run_all
from dagrl.scheduler.plan import WorkerId
from dagrl.workers.errors import RunError, WorkerDiedError, WorkerLostError


async def value(result: int) -> int:
    await asyncio.sleep(0)
    return result


async def failure(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


def test_results_come_in_order() -> None:
    assert asyncio.run(run_all([value(3), value(1), value(2)])) == [3, 1, 2]
    assert asyncio.run(run_all([])) == []


def test_coroutines_started_by_others_are_joined_too() -> None:
    done = []

    async def chain(group: TaskGroup, left: int) -> None:
        await asyncio.sleep(0)
        done.append(left)
        if left:
            group.start(chain(group, left - 1))

    async def run() -> None:
        group = TaskGroup()
        group.start(chain(group, 3))
        await group.join()

    asyncio.run(run())
    assert done == [3, 2, 1, 0]


def test_a_dead_worker_is_raised_before_other_failures() -> None:
    with pytest.raises(WorkerDiedError, match="gone"):
        asyncio.run(run_all([failure(RunError("a peer is silent")), failure(WorkerDiedError("gone")), value(1)]))


def test_a_loss_with_a_name_is_raised_before_one_without() -> None:
    named = WorkerLostError("its server has died")
    named.lost = (WorkerId("generator", 0),)
    with pytest.raises(WorkerLostError, match="its server has died"):
        asyncio.run(run_all([failure(WorkerLostError("a peer has ended")), failure(named), value(1)]))


def test_a_dead_worker_is_raised_at_once(monkeypatch) -> None:
    monkeypatch.setattr("dagrl.orchestrator.groups.task_group._SECOND_FAILURE_S", 3600)

    async def run() -> None:
        async with asyncio.timeout(60):
            await run_all([asyncio.sleep(3600), failure(WorkerDiedError("gone"))])

    with pytest.raises(WorkerDiedError, match="gone"):
        asyncio.run(run())


def test_a_failure_ends_the_others(caplog, monkeypatch) -> None:
    monkeypatch.setattr("dagrl.orchestrator.groups.task_group._SECOND_FAILURE_S", 0.01)
    ended = []

    async def patient() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append(True)
            raise

    async def run() -> None:
        with pytest.raises(RunError, match="no"):
            await run_all([patient(), failure(RunError("no"))])
        await asyncio.sleep(0)

    asyncio.run(run())
    gc.collect()
    assert ended == [True]
    assert "never retrieved" not in caplog.text
