"""Elastic groups: who is spared, who joins, and when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dagrl.config.coordinates import Coordinates
from dagrl.config.schema import GroupSpec, Scope
from dagrl.orchestrator.groups import elastic as elastic_module
from dagrl.orchestrator.groups.elastic import ElasticGroups
from dagrl.orchestrator.groups.worker_failures import RestartPolicy, WorkerFailures
from dagrl.scheduler.commands import WorkerLost
from dagrl.scheduler.plan import Executor, Plan, PlannedTask, Rows, WorkerId
from dagrl.workers.errors import RunError, WorkerDiedError

SERVERS = tuple(Coordinates(tp, 0, server, 0, primary=tp == 0) for server in range(4) for tp in range(2))
PLAN = Plan(
    {"generator": Executor("generator", "rollout", SERVERS, are_servers=True)},
    (PlannedTask("rollout", "rollout", "rollout", "generator", Scope.BATCH, Rows.TRAIN, generates=True),),
    shards=1,
    steps=9,
)
"""Four servers of two GPUs, on two machines."""


class Groups:
    """Stands in for the worker groups and the machines of their slots."""

    def __init__(self, present: range) -> None:
        self.workers = SimpleNamespace(by_rank={rank: WorkerId("generator", rank) for rank in present})
        self.slots, self.machines, self.free = self, {rank // 4 for rank in present}, 0
        self.killed: list[int] = []
        self.fails = False

    def __getitem__(self, executor: str) -> Any:
        return self.workers

    def kill_ranks(self, executor: str, ranks: list[int]) -> None:
        self.killed += ranks

    def remove(self, executor: str, ranks: set[int]) -> None:
        for rank in ranks:
            del self.workers.by_rank[rank]

    def add(self, handles: list[Any]) -> None:
        self.workers.by_rank |= {handle.id.rank: handle.id for handle in handles}

    def has(self, group: str, node: int) -> bool:
        assert group == "rollout"
        return node in self.machines

    def join(self, group: str) -> int | None:
        if not self.free:
            return None
        self.free -= 1
        self.machines.add(node := min({0, 1} - self.machines))
        return node

    async def start_more(self, executor: str, ranks: list[int]) -> list[Any]:
        if self.fails:
            self.fails = False
            raise RunError("no memory")
        return [SimpleNamespace(id=WorkerId(executor, rank)) for rank in ranks]


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, present: range = range(8), least: int = 1) -> None:
        monkeypatch.setattr(elastic_module, "_LOOK_EVERY_S", 0.0)
        monkeypatch.setattr(elastic_module, "_PAUSE_S", 0.0)
        self.groups, self.notes = Groups(present), []
        pipeline: Any = SimpleNamespace(groups={"rollout": GroupSpec(nodes=2, min_nodes=least, gpus_per_node=4)})
        groups: Any = self.groups
        self.elastic = ElasticGroups(groups, PLAN, pipeline, self.notes.append)
        self.policy = RestartPolicy(3)
        self.policy.has_run = True
        self.failures = WorkerFailures(groups, PLAN, self.policy, 1.0, {}, lambda _: ("generator",), self.elastic)

    def lose(self, *ranks: int, alive: bool = False) -> WorkerLost | None:
        failure = WorkerDiedError("the worker's process died", worker="generator")
        failure.lost = tuple(WorkerId("generator", rank) for rank in ranks)
        failure.alive = failure.lost if alive else ()
        return asyncio.run(self.failures.handle(failure, self.notes.append))

    def refill(self) -> None:
        async def some_rounds() -> None:
            refilling = asyncio.ensure_future(self.elastic.refill())
            for _ in range(20):
                await asyncio.sleep(0)
            refilling.cancel()

        asyncio.run(some_rounds())


def test_a_lost_server_leaves_without_a_restart(monkeypatch) -> None:
    scene = Scene(monkeypatch)
    assert scene.lose(2) == WorkerLost("generator")
    assert scene.groups.killed == [2, 3], "all of its server"
    assert [*scene.groups.workers.by_rank] == [0, 1, 4, 5, 6, 7]
    assert scene.notes == ["generator/2 is lost: the worker's process died; generator goes on without"]
    assert asyncio.run(scene.failures.restart("generator")) == []
    assert scene.policy.count == 0 and scene.elastic.missing == 2


def test_a_loss_that_two_commands_report_counts_once(monkeypatch) -> None:
    scene = Scene(monkeypatch)
    assert scene.lose(2) == WorkerLost("generator")
    assert scene.lose(2) is None, "the first report is not handled yet"
    assert scene.groups.killed == [2, 3] and len(scene.notes) == 1


@pytest.mark.parametrize(("lost", "least"), [((0, 2, 4), 1), ((2,), 2)])
def test_a_group_that_would_be_too_small_is_restarted(monkeypatch, lost, least) -> None:
    scene = Scene(monkeypatch, least=least)
    scene.lose(*lost)
    assert scene.policy.count == 1
    assert len(scene.groups.workers.by_rank) == 8


def test_a_worker_that_lives_starts_its_server_again(monkeypatch) -> None:
    scene = Scene(monkeypatch)
    scene.lose(2, alive=True)
    assert scene.policy.count == 1 and not scene.groups.killed


def test_workers_join_with_the_next_weights(monkeypatch) -> None:
    scene = Scene(monkeypatch, present=range(4))
    scene.refill()
    assert scene.elastic.admit("generator") == [], "there is no machine"
    scene.groups.free, scene.groups.fails = 1, True
    scene.refill()
    assert scene.elastic.missing == 4, "they have no weights yet"
    assert scene.elastic.admit("generator") == [WorkerId("generator", rank) for rank in (4, 5, 6, 7)]
    assert scene.elastic.missing == 0 and scene.elastic.admit("generator") == []
    assert scene.notes == [
        "generator stays without 4 of its ranks, which did not start: no memory",
        "generator/4, generator/5, generator/6, generator/7 joined: generator has 8 of 8 ranks",
    ]


def test_a_machine_that_lost_a_server_gets_it_back(monkeypatch) -> None:
    scene = Scene(monkeypatch)
    scene.lose(6)
    scene.refill()
    assert scene.elastic.admit("generator") == [WorkerId("generator", 6), WorkerId("generator", 7)]
