"""Ways to make a Megatron engine take less memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dagrl.backends.changes import Change, Ladder, Room, doubled, general_ladders
from dagrl.backends.planned_engine import PlannedEngine

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def ladders(engine: PlannedEngine[Any], room: Room) -> Iterator[Ladder]:
    """Yield the ways, those that cost the least time first."""
    spec, shape = engine.spec, engine.shape
    sizes = spec.parallel

    def change(section: str, **values: Any) -> Change:
        return Change({("engines", engine.name, section, key): value for key, value in values.items()})

    def split(key: str, most: int, **also: Any) -> Ladder:
        return Ladder([change("parallel", **{key: size}, **also) for size in doubled(sizes.model_dump()[key], most)])

    if spec.sleep is not False and spec.keep_communicators:
        yield Ladder([Change({("engines", engine.name, "keep_communicators"): False})])
    yield from general_ladders(engine)
    if spec.transformer.get("recompute_granularity") != "full":
        yield Ladder([change("transformer", **FULL_RECOMPUTE)])
    if not spec.fused_linear_cross_entropy and spec.head == "lm":
        yield Ladder([Change({("engines", engine.name, "fused_linear_cross_entropy"): True})])
    yield split("tensor_model_parallel_size", room.in_machine, sequence_parallel=True)
    if sizes.tensor_model_parallel_size > 1 and not sizes.sequence_parallel:
        yield Ladder([change("parallel", sequence_parallel=True)])
    yield split("pipeline_model_parallel_size", room.ranks)
    if shape.experts is not None:
        yield split("expert_model_parallel_size", min(room.ranks, shape.experts.count))
    away = [] if spec.offload.optimizer else [change("offload", optimizer=True)]
    if not spec.optimizer.get("optimizer_cpu_offload"):
        away.append(change("optimizer", optimizer_cpu_offload=True))
    yield Ladder(away)
