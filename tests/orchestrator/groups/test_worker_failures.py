"""Events that the scheduler gets for lost workers, and their order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dagrl.config.coordinates import Coordinates
from dagrl.config.schema import GroupSpec, Scope
from dagrl.orchestrator.groups.elastic import ElasticGroups
from dagrl.orchestrator.groups.worker_failures import RestartPolicy, WorkerFailures
from dagrl.scheduler.commands import Command, CommandDone, Run, Sync, WorkerLost
from dagrl.scheduler.plan import Executor, Plan, PlannedTask, Rows, WorkerId
from dagrl.workers.errors import WorkerDiedError, WorkerHungError, WorkerLostError

ROLLOUT, SYNC = Run(3, "rollout", (0, 1)), Sync(3, "generator", "actor", 2)
PLACES = tuple(Coordinates(0, 0, rank, 0, primary=True) for rank in range(2))
FIRST, SECOND, ACTOR = WorkerId("generator", 0), WorkerId("generator", 1), WorkerId("actor", 0)
TEACHER, REFERENCE = WorkerId("teacher", 1), WorkerId("reference", 0)
SERVERS = ("generator", "teacher")
PLAN = Plan(
    {
        name: Executor(name, name, PLACES, trained=name == "actor", are_servers=name in SERVERS)
        for name in (*SERVERS, "actor", "reference")
    },
    (PlannedTask("rollout", "rollout", "rollout", "generator", Scope.BATCH, Rows.TRAIN, generates=True),),
    shards=2,
    steps=9,
)
GROUPS = SimpleNamespace(groups={name: GroupSpec(cpus_per_node=2) for name in PLAN.executors})
REWARD = Run(3, "reward", (0,))
SCORED = Run(3, "scored", (0,))
EXECUTORS = {ROLLOUT: ("generator",), SYNC: ("generator", "actor"), REWARD: ("host",), SCORED: ("teacher",)}


class Workers:
    """Stands in for a groups."""

    def __init__(self) -> None:
        self.given_up: list[WorkerId] = []
        self.started: list[tuple[str, list[int], set[int]]] = []

    def kill_ranks(self, name: str, ranks: list[int]) -> None:
        self.given_up += [WorkerId(name, rank) for rank in ranks]

    async def start_again(self, name: str, ranks: list[int], killed: set[int]) -> None:
        self.started.append((name, ranks, killed))


class Scene:
    """Running commands, each ended as the test requires."""

    def __init__(self, most: int = 3, bound_s: float = 5.0) -> None:
        self.groups, self.notes, self.heard = Workers(), [], []
        elastic = ElasticGroups(self.groups, PLAN, GROUPS, self.notes.append)  # type: ignore[arg-type]
        restarts = RestartPolicy(most)
        restarts.has_run = True
        self.under_way: dict[asyncio.Task[Any], Command] = {}
        self.failures = WorkerFailures(
            self.groups, PLAN, restarts, bound_s, self.under_way, EXECUTORS.__getitem__, elastic
        )  # type: ignore[arg-type]

    def begin(self, command: Command, action: Callable[[], Awaitable[None]]) -> asyncio.Task[Any]:
        async def carry_out() -> None:
            try:
                await action()
                self.heard.append(command)
            except WorkerLostError as failure:
                event = await self.failures.handle(failure, self.notes.append)
                if event is not None:
                    self.heard.append(event)

        task = asyncio.get_running_loop().create_task(carry_out())
        self.under_way[task] = command
        task.add_done_callback(self.under_way.pop)
        return task


def dies(*lost: WorkerId, after_s: float = 0.0, alive: tuple[WorkerId, ...] = ()) -> Callable[[], Awaitable[None]]:
    async def action() -> None:
        await asyncio.sleep(after_s)
        error = WorkerDiedError("died", worker=", ".join(map(str, lost)))
        error.lost, error.alive = lost, alive
        raise error

    return action


def ends(after_s: float) -> Callable[[], Awaitable[None]]:
    return lambda: asyncio.sleep(after_s)


def play(scene: Scene, **actions: Callable[[], Awaitable[None]]) -> list[Any]:
    commands = {"rollout": ROLLOUT, "sync": SYNC, "reward": REWARD, "scored": SCORED}

    async def act() -> None:
        await asyncio.gather(*[scene.begin(commands[name], action) for name, action in actions.items()])

    asyncio.run(act())
    return scene.heard


def test_a_lost_generator_is_reported() -> None:
    scene = Scene()
    assert play(scene, rollout=dies(SECOND)) == [WorkerLost("generator")]
    assert scene.groups.given_up == [SECOND]
    assert scene.notes == [
        "generator/1 is lost: died; generator goes on when generator/1 is restarted (restart 1 of 3)"
    ]


def test_a_worker_that_has_lost_only_its_server_is_not_killed() -> None:
    scene = Scene()
    assert play(scene, rollout=dies(FIRST, SECOND, alive=(FIRST,))) == [WorkerLost("generator")]
    assert scene.groups.given_up == [SECOND]
    asyncio.run(scene.failures.restart("generator"))
    assert scene.groups.started == [("generator", [0, 1], {1})]


def test_a_generator_lost_in_a_sync_is_reported() -> None:
    assert play(Scene(), sync=dies(FIRST)) == [WorkerLost("generator")]


def test_nothing_begins_on_lost_workers_until_the_loss_is_reported() -> None:
    """New weights may be ready for a generator that is sampling: its sync would outlive the report."""
    scene = Scene()
    assert not scene.failures.awaits_report(SYNC)
    play(scene, rollout=dies(SECOND))
    assert scene.failures.awaits_report(SYNC) and not scene.failures.awaits_report(REWARD)
    scene.failures.report([CommandDone(REWARD), WorkerLost("generator")])
    assert not scene.failures.awaits_report(SYNC)


def test_a_lost_server_that_only_reads_is_reported() -> None:
    scene = Scene()
    assert play(scene, scored=dies(TEACHER), reward=ends(0.1)) == [WorkerLost("teacher"), REWARD]
    assert scene.groups.given_up == [TEACHER]
    assert scene.notes == ["teacher/1 is lost: died; teacher goes on when teacher/1 is restarted (restart 1 of 3)"]


@pytest.mark.parametrize("first", ["rollout", "sync"])
def test_a_loss_that_ends_two_commands_is_reported_once_and_last(first) -> None:
    """A sync in flight, in the midst of a rollout."""
    scene = Scene()
    actions = {name: dies(SECOND, after_s=0.0 if name == first else 0.1) for name in ("rollout", "sync")}
    assert play(scene, **actions, reward=ends(0.2)) == [WorkerLost("generator"), REWARD]
    assert len(scene.notes) == 1


def test_commands_that_succeed_are_reported_before_the_loss() -> None:
    assert play(Scene(), rollout=dies(SECOND), sync=ends(0.1)) == [SYNC, WorkerLost("generator")]


@pytest.mark.parametrize("names", [(ACTOR,), (REFERENCE,), (FIRST, ACTOR), ()])
def test_other_losses_end_the_run(names) -> None:
    scene = Scene()
    with pytest.raises(WorkerDiedError, match="died"):
        play(scene, rollout=dies(*names))
    assert (scene.heard, scene.groups.given_up) == ([], [])


def test_a_spent_restart_budget_ends_the_run() -> None:
    with pytest.raises(WorkerDiedError, match="died"):
        play(Scene(most=0), rollout=dies(SECOND))


def test_the_wait_for_other_commands_has_a_timeout_that_names_them() -> None:
    with pytest.raises(WorkerHungError, match=r"waited 0.1 s for Sync\(.*\) to end, as generator has lost workers"):
        play(Scene(bound_s=0.1), rollout=dies(SECOND), sync=ends(1.0))
