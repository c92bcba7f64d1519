"""Where workers are created."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagrl.orchestrator.groups import slots as slots_module
from dagrl.orchestrator.groups.slots import SlotAllocator

HERE = {
    "Alive": True,
    "NodeID": "a" * 56,
    "NodeManagerAddress": "10.0.0.7",
    "NodeManagerHostname": "node7",
    "Resources": {"CPU": 2.0},
}


class CountingRay:
    """The part of Ray that host workers use. It counts the actors and keeps the options of their class."""

    def __init__(self) -> None:
        self.created = 0
        self.options: dict[str, Any] = {}

    def remote(self, **options: Any) -> Any:
        self.options |= options
        return lambda worker: self._of_class()

    def _of_class(self) -> Any:
        def create() -> str:
            self.created += 1
            return "an actor"

        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=create))

    def nodes(self) -> list[dict[str, Any]]:
        return [HERE]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: HERE["NodeID"])


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> CountingRay:
    counting = CountingRay()
    monkeypatch.setattr(slots_module, "ray", counting)
    return counting


def test_the_creation_of_many_workers_can_be_cancelled(ray: CountingRay) -> None:
    many = 10_000
    slots = SlotAllocator(SimpleNamespace(), SimpleNamespace(groups={}))  # type: ignore[arg-type]
    executor: Any = SimpleNamespace(group=None, ranks=many)

    async def interrupted() -> None:
        placing = asyncio.create_task(slots.place(executor, Path(), 1, range(many)))
        while not ray.created and not placing.done():
            await asyncio.sleep(0)
        placing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await placing

    asyncio.run(interrupted())
    assert ray.created < 10


def test_workers_are_created_in_order_and_their_calls_are_not_kept(ray: CountingRay) -> None:
    slots = SlotAllocator(SimpleNamespace(), SimpleNamespace(groups={}))  # type: ignore[arg-type]
    actors = asyncio.run(slots.place(SimpleNamespace(group=None, ranks=3), Path(), 1, range(3)))  # type: ignore[arg-type]
    assert (len(actors), ray.created) == (3, 3)
    assert ray.options == {"enable_task_events": False}
