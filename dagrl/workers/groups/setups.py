"""What each worker of an executor is told to become. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dagrl.backends.sglang.layout import server_slots
from dagrl.config.schema import Pipeline, SglangEngineSpec
from dagrl.scheduler.plan import Executor
from dagrl.workers.messages import StartEngine, Whereabouts


def setups(executor: Executor, where: Sequence[Whereabouts], common: StartEngine) -> list[StartEngine]:
    """One for each rank; `where` the ranks' workers are, and what all workers of the run have in `common`."""
    engine = executor.engines[0] if executor.engines else None
    mine = [
        replace(
            common,
            engine=engine,
            rank=rank,
            world_size=executor.ranks,
            replica=place.dp,
            trained=executor.trained,
            keeps_start_weights=len(executor.engines) > 1,
            master_addr=where[0].address,
            master_port=where[0].port,
        )
        for rank, place in enumerate(executor.places)
    ]
    spec = common.pipeline.engines[engine] if engine else None
    return _of_servers(spec, where, mine) if isinstance(spec, SglangEngineSpec) else mine


def live_together(executor: Executor, pipeline: Pipeline, rank: int) -> list[int]:
    """The ranks of a generator that are of no use without `rank`, itself included: those of the same server."""
    spec = pipeline.engines[executor.engines[0]]
    if not isinstance(spec, SglangEngineSpec):
        return [rank]
    slots = server_slots(spec, pipeline.groups[spec.group])
    return [other for other, slot in enumerate(slots) if slot.server == slots[rank].server]


def _of_servers(
    spec: SglangEngineSpec, where: Sequence[Whereabouts], alike: Sequence[StartEngine]
) -> list[StartEngine]:
    """The ranks of a server meet at its first slot; whoever starts its processes on a machine gets their GPUs."""
    slots = server_slots(spec, alike[0].pipeline.groups[spec.group])
    found = []
    for slot, setup in zip(slots, alike, strict=True):
        leader = where[slots.index(next(other for other in slots if other.server == slot.server))]
        gpus = tuple(
            gpu
            for other, its in zip(slots, where, strict=True)
            if (other.server, other.node) == (slot.server, slot.node)
            for gpu in its.gpus
        )
        found.append(
            replace(setup, master_addr=leader.address, master_port=leader.port, gpus=gpus if slot.starts else ())
        )
    return found
