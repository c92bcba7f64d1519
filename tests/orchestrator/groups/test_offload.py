"""Sleeps and wakes that the driver requests, and its report of the engines on the devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from dagrl.backends.base import SleepReport
from dagrl.config.coordinates import Coordinates
from dagrl.config.residency import Residency
from dagrl.orchestrator.groups.offload import Offloader
from dagrl.scheduler.commands import Sleep, Wake
from dagrl.scheduler.plan import Executor, Plan
from dagrl.workers.errors import RunError
from dagrl.workers.worker import Worker

ONE_RANK = (Coordinates(0, 0, 0, 0, primary=True),)
PLAN = Plan(
    {
        name: Executor(name, group, ONE_RANK, (name,), on_gpus=True, sleeps=sleeps)
        for name, group, sleeps in (
            ("actor", "gpus", True),
            ("critic", "gpus", False),
            ("generator", "gpus", True),
            ("judge", "others", False),
        )
    },
    tasks=(),
    shards=1,
    steps=1,
)
DOWN = Sleep(1, "generator", Residency.WEIGHTS)
OFF = Sleep(1, "generator", Residency.ASLEEP)


class Workers:
    """Stands in for the workers: what they answer, and what they were asked."""

    def __init__(self, *freed: float) -> None:
        self.freed = list(freed)
        self.calls: list[tuple[Any, ...]] = []
        self.fails = False

    def __getitem__(self, executor: str) -> Group:
        return Group(self, executor)

    def answer(self, executor: str, waits_for: str, method: Callable[..., Any], *args: Any) -> list[Any]:
        self.calls.append((executor, method, *args))
        if self.fails:
            raise RunError("out of memory", node=waits_for)
        return (
            [SleepReport(freed, 60.0) for freed in (self.freed.pop(0), 99.0)]
            if method is Worker.sleep
            else [None, None]
        )


class Group:
    """The workers of one executor."""

    def __init__(self, workers: Workers, executor: str) -> None:
        self._workers, self._executor = workers, executor

    async def call_all(self, waits_for: str, method: Callable[..., Any], *args: Any) -> list[Any]:
        return self._workers.answer(self._executor, waits_for, method, *args)


ALL_AWAKE = dict.fromkeys(PLAN.executors, Residency.AWAKE)


def moves_of(workers: Workers, residency: dict[str, Residency]) -> Offloader:
    return Offloader(workers, PLAN, residency.__getitem__)  # type: ignore[arg-type]


def test_freed_memory_adds_up_until_the_executor_wakes_up():
    workers = Workers(30.0, 12.5, 40.0)
    moves = moves_of(workers, ALL_AWAKE)
    asyncio.run(moves.move(DOWN))
    assert moves.freed_gib("generator") == 30.0, "of two ranks, the one that gave less"
    asyncio.run(moves.move(OFF))
    assert moves.freed_gib("generator") == 42.5
    asyncio.run(moves.move(Wake(1, "generator", Residency.WEIGHTS)))
    assert moves.freed_gib("generator") == 0
    asyncio.run(moves.move(OFF))
    assert moves.freed_gib("generator") == 40.0
    assert workers.calls == [
        ("generator", Worker.sleep, Residency.WEIGHTS),
        ("generator", Worker.sleep, Residency.ASLEEP),
        ("generator", Worker.wake, Residency.WEIGHTS),
        ("generator", Worker.sleep, Residency.ASLEEP),
    ]


def test_residency_is_described_for_time_shared_groups():
    residency = {**ALL_AWAKE, "actor": Residency.WEIGHTS, "generator": Residency.ASLEEP}
    moves = moves_of(Workers(61.25), residency)
    asyncio.run(moves.move(OFF))
    everybody = "actor has its weights alone, critic awake, generator asleep (freed 61.2 GiB a GPU)"
    assert moves.describe(["critic"]) == f"group gpus: {everybody}"
    assert moves.describe(["judge"]) == ""
    assert moves.describe([]) == ""


def test_a_failed_move_is_described_with_its_target():
    workers = Workers()
    workers.fails = True
    moves = moves_of(workers, ALL_AWAKE)
    with pytest.raises(RunError) as caught:
        asyncio.run(moves.move(DOWN))
    assert caught.value.node == "generator to give memory back down to: its weights alone"
    on_its_way = "generator moving from awake to its weights alone"
    assert moves.describe(["generator"]) == f"group gpus: actor awake, critic awake, {on_its_way}"
