"""The defaults of a descriptor: a backend that writes no estimates has a plan on GPUs too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dagrl.backends.backend import Backend, EngineStart
from dagrl.backends.families.registry import model_shape
from dagrl.backends.planning.changes import Room
from dagrl.backends.planning.costs import PlannedBatch
from dagrl.backends.planning.decoding import Generation, Lengths, shard_ends
from dagrl.backends.planning.gpus import gpu_named
from dagrl.backends.planning.memory import CONTEXT
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.config.residency import Residency
from dagrl.scheduler.placement import make_plan
from dagrl.validation import check_file

TEMPLATE = Path(__file__).parents[2] / "dag_templates" / "qwen3_8b_megatron.yaml"


class PlainBackend(Backend):
    name = "plain"
    summary = "has the defaults"

    def build(self, start: EngineStart) -> Any:
        raise NotImplementedError


BACKEND = PlainBackend()


def planned(name: str, *overrides: str) -> PlannedEngine[Any]:
    checked = check_file(TEMPLATE, overrides, with_files=False)
    pipeline = checked.loaded.pipeline
    plan = make_plan(pipeline, checked.graph)
    return PlannedEngine(pipeline, plan, name, model_shape(pipeline.model), gpu_named("H200"))


def test_memory_is_a_whole_model_in_16_bits() -> None:
    generator = planned("generator")
    memory = BACKEND.memory(generator)
    assert memory.awake == {"weights": 2 * generator.shape.parameters, "runtime": CONTEXT}
    assert (memory.asleep, memory.host) == (CONTEXT, memory.awake["weights"])


def test_work_and_moves_take_time() -> None:
    generator = planned("generator")
    costs, lengths = BACKEND.costs(generator), Lengths(512, 1024, 2048)
    batch = PlannedBatch(64, lengths, 16384)
    tokens = 64 * 1536 / generator.executor.replicas
    assert costs.forward(batch) == pytest.approx(2 * generator.shape.parameters * tokens / costs.device.matmul)
    assert costs.update(batch) == 3 * costs.forward(batch)
    assert shard_ends(costs.server, Generation(64, 1, lengths))[-1] > 0
    assert costs.wake(Residency.WEIGHTS) > costs.wake(Residency.AWAKE) > 0
    # A receiver of weights drops them in a sleep; others keep them on the host.
    alone = BACKEND.costs(planned("generator", "engines.generator.weights_from=null"))
    assert alone.sleep(Residency.ASLEEP) > costs.sleep(Residency.ASLEEP) > 0
    assert costs.save(background=False) > costs.save(background=True) > 0


def test_remedies_are_to_sleep_and_smaller_micro_batches() -> None:
    actor = planned("actor", "engines.actor.sleep=false")
    asleep, *smaller = [ladder.rungs for ladder in BACKEND.changes(actor, Room(8, 8)) if ladder.rungs]
    assert asleep[0].overrides() == ["engines.actor.sleep=auto"]
    assert any("tokens_per_micro_batch" in each for ladder in smaller for each in ladder[0].overrides())
    assert BACKEND.any_layout is None and not list(BACKEND.layouts(actor.pipeline, [actor.shape], actor.group))
