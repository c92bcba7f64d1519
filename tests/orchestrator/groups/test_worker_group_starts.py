"""The order in which workers are asked to start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from project import BASE

from dagrl.config.loading.loader import load_pipeline
from dagrl.graph.inference import build_graph
from dagrl.orchestrator.groups import worker_group
from dagrl.orchestrator.groups.worker_group import WorkerGroups
from dagrl.scheduler.placement import make_plan
from dagrl.workers.messages import StartEngine, WorkerInfo
from dagrl.workers.serialization import deserialize

ON_ONE_GPU = (
    "groups={gpus: {gpus_per_node: 1}}",
    "engines.actor={backend: megatron, group: gpus, sleep: true, optimizer: {lr: 1e-3}}",
    "engines.reference={backend: megatron, group: gpus, sleep: true}",
    "engines.generator={backend: sglang, group: gpus, sleep: true, weights_from: actor}",
)


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls to the workers of one GPU, in order, as (executor, method)."""
    (tmp_path / "p.yaml").write_text(BASE)
    loaded = load_pipeline(tmp_path / "p.yaml", ON_ONE_GPU)
    plan = make_plan(loaded.pipeline, build_graph(loaded.pipeline, loaded.folder))
    asked: list[tuple[str, str]] = []

    class Actor:
        """The interface that Ray gives to the worker of one executor."""

        def __init__(self, name: str) -> None:
            self.name = name
            self.call = self

        def remote(self, data: bytes, refs: list[Any]) -> Any:
            method, _, _ = deserialize(data, refs)
            asked.append((self.name, method.__name__))

            async def answer() -> Any:
                return WorkerInfo("here", "127.0.0.1", 1, 1, ()) if method.__name__ == "describe" else None

            return answer()

    class Slots:
        def __init__(self, *_: Any) -> None: ...

        async def ranks(self, executor: Any) -> list[int]:
            return [*range(executor.ranks)]

        async def place(self, executor: Any, *_: Any) -> list[Actor]:
            return [Actor(executor.name) for _ in range(executor.ranks)]

    monkeypatch.setattr(worker_group, "SlotAllocator", Slots)

    def start() -> list[tuple[str, str]]:
        groups = WorkerGroups(plan, loaded.pipeline)
        setup = StartEngine(loaded.pipeline, tmp_path, tmp_path)
        asyncio.run(groups.launch(setup, None, print))
        return [(name, method) for name, method in asked if name != "host"]

    return start


def test_libraries_are_imported_before_any_worker_is_waited_for(launch: Any) -> None:
    order = launch()
    assert [method for _, method in order[:6]] == 3 * ["describe"] + 3 * ["preload"]
    assert [name for name, method in order if method == "start"] == ["generator", "reference", "actor"]
