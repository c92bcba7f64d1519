"""The route of new weights from a trained engine to a receiving one, and the order of the receiving ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dagrl.config.coordinates import Coordinates
from dagrl.config.fp8_weights import Fp8Weights
from dagrl.config.schema import GroupSpec, Pipeline
from dagrl.config.schema.engine import Transport


@dataclass(frozen=True, slots=True)
class WeightRoute:
    """The route of the weights of one engine."""

    way: Transport
    """``cuda_ipc`` goes through the host's memory on CPUs."""
    bucket_bytes: int
    """Size of a bucket, unless one tensor is larger."""
    passes: int
    """2 if everything is sent again for comparison."""
    waves: tuple[tuple[int, ...], ...]
    """Waves of ranks of the group that receive weights together."""
    keep_buffers: bool = False
    """Whether receivers keep the memory of their buckets between updates, because no other engine uses the devices."""
    fp8: Fp8Weights | None = None
    """Weights that the sender quantises."""

    def to(self, ranks: Collection[int]) -> WeightRoute:
        """The route to some of the ranks."""
        return replace(self, waves=tuple(tuple(rank for rank in wave if rank in ranks) for wave in self.waves))


def weight_route(pipeline: Pipeline, follower: str) -> WeightRoute:
    """The route of a checked pipeline to an engine with ``weights_from``."""
    engine = pipeline.engines[follower]
    assert engine.weights_from is not None and engine.group is not None, f"{follower} takes no weights"
    trainer = pipeline.engines[engine.weights_from]
    assert trainer.group is not None, "a trained engine must have a group"
    group, asked = pipeline.groups[engine.group], engine.weight_sync
    chosen = chosen_way(group, pipeline.groups[trainer.group], shared=trainer.group == engine.group)
    if asked.route != "auto":
        chosen = asked.route
    return WeightRoute(
        chosen if chosen in engine.transports else engine.transports[-1],
        asked.bucket_mib << 20,
        2 if asked.checksum else 1,
        _waves(engine.layout(group)),
        # Only servers have memory that outlives an update.
        keep_buffers=engine.replicas_are_servers and not pipeline.sleeps(follower),
        fp8=engine.taken_fp8,
    )


def _waves(layout: Sequence[Coordinates]) -> tuple[tuple[int, ...], ...]:
    """Ranks by pipeline stage: a server passes an update to a stage after the previous stage has received it."""
    stages = sorted({place.pp for place in layout})
    return tuple(tuple(rank for rank, place in enumerate(layout) if place.pp == stage) for stage in stages)


def chosen_way(servers: GroupSpec, trainer: GroupSpec, *, shared: bool) -> Transport:
    """The meaning of ``auto``; `shared`: both engines are on the same group."""
    if servers.is_cpu or trainer.is_cpu:
        return "object_store"
    return "cuda_ipc" if shared else "broadcast"
