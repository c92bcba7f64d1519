"""Which way new weights go from a trained engine to one that follows it, and who takes them when. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dagrl.backends.sglang.layout import gpus_per_server
from dagrl.config.schema import GroupSpec, HfEngineSpec, MegatronEngineSpec, Pipeline, SglangEngineSpec
from dagrl.graph.sleeping import sleeps

Way = Literal["cuda_ipc", "broadcast", "object_store"]
_DEFAULT_BUCKET_MIB = 256


@dataclass(frozen=True, slots=True)
class WeightRoute:
    """How one engine gets its weights."""

    way: Way
    """``cuda_ipc`` is through the host's memory on CPUs, the same otherwise."""
    bucket_bytes: int
    """What travels together, at most, unless one tensor is larger."""
    passes: int
    """2 where everything is sent once more, to be compared."""
    waves: tuple[tuple[int, ...], ...]
    """Which slots of the group take weights together, wave after wave: SGLang tells a pipeline stage of an update when
    the one before has taken it."""
    keeps_room: bool = False
    """Whether those that take weights keep the memory that buckets come in, as they have the devices to themselves."""


def weight_route(pipeline: Pipeline, follower: str) -> WeightRoute:
    """The route of a checked pipeline to an engine that follows another."""
    engine = pipeline.engines[follower]
    assert not isinstance(engine, MegatronEngineSpec) and engine.weights_from is not None, f"{follower} follows nobody"
    group = pipeline.groups[engine.group]
    if isinstance(engine, HfEngineSpec):
        return WeightRoute("object_store", _DEFAULT_BUCKET_MIB << 20, 1, (tuple(range(group.ranks)),))
    trainer = pipeline.engines[engine.weights_from]
    assert trainer.group is not None, "an engine that is trained has a group of its own"
    asked = engine.weight_sync.route
    way = chosen_way(group, pipeline.groups[trainer.group], shared=trainer.group == engine.group)
    return WeightRoute(
        way if asked == "auto" else asked,
        engine.weight_sync.bucket_mib << 20,
        2 if engine.weight_sync.checksum else 1,
        _waves(engine, group.ranks),
        keeps_room=not sleeps(pipeline, follower),
    )


def chosen_way(servers: GroupSpec, trainer: GroupSpec, *, shared: bool) -> Way:
    """What ``auto`` stands for; `shared`: both are the same group."""
    if servers.is_cpu or trainer.is_cpu:
        return "object_store"
    return "cuda_ipc" if shared else "broadcast"


def _waves(engine: SglangEngineSpec, slots: int) -> tuple[tuple[int, ...], ...]:
    each, stages = gpus_per_server(engine), engine.server.get("pp_size", 1)
    a_stage = each // stages
    return tuple(tuple(slot for slot in range(slots) if slot % each // a_stage == stage) for stage in range(stages))
