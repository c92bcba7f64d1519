"""The setup of each worker of an executor. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dagrl.config.schema import Pipeline
from dagrl.scheduler.plan import Executor
from dagrl.workers.messages import StartEngine, WorkerInfo


def setups(executor: Executor, where: Sequence[WorkerInfo], common: StartEngine) -> list[StartEngine]:
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
    if spec is None or not spec.replicas_are_servers:
        return mine
    group = common.pipeline.groups[str(spec.group)]
    return _of_servers(executor, where, mine, per_node=group.gpus_per_node or group.cpus_per_node)


def live_together(executor: Executor, pipeline: Pipeline, rank: int) -> list[int]:
    """The ranks of a generator that are of no use without `rank`, including it: those of the same server."""
    if not pipeline.engines[executor.engines[0]].replicas_are_servers:
        return [rank]
    replica = executor.places[rank].dp
    return [other for other, place in enumerate(executor.places) if place.dp == replica]


def _of_servers(
    executor: Executor, where: Sequence[WorkerInfo], alike: Sequence[StartEngine], *, per_node: int
) -> list[StartEngine]:
    """The ranks of a server meet at its first rank. Its first rank on each machine gets all of its GPUs there."""
    found = []
    for rank, setup in enumerate(alike):
        server = [other for other, place in enumerate(executor.places) if place.dp == executor.places[rank].dp]
        leader, here = where[server[0]], [other for other in server if other // per_node == rank // per_node]
        gpus = tuple(gpu for other in here for gpu in where[other].gpus) if rank == here[0] else ()
        found.append(replace(setup, master_addr=leader.address, master_port=leader.port, gpus=gpus))
    return found
