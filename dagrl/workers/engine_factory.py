"""Builds the rank of an engine inside the worker that holds it."""

from __future__ import annotations

from dagrl.backends.backend import EngineStart, RankContext
from dagrl.backends.base import AnyEngine
from dagrl.backends.registry import backend_of
from dagrl.workers.messages import StartEngine


def make_engine(setup: StartEngine, listen_fd: int | None) -> AnyEngine:
    """Build the rank that `setup` names. The backend is imported only here.

    `listen_fd` is a socket on which the ranks meet, on the rank that opened it.
    """
    pipeline = setup.pipeline
    assert setup.engine is not None
    ranks = RankContext(
        rank=setup.rank,
        world_size=setup.world_size,
        master_addr=setup.master_addr,
        master_port=setup.master_port,
        timeout_s=pipeline.run.node_timeout_s,
        seed=pipeline.run.seed,
        listen_fd=listen_fd,
    )
    start = EngineStart(
        pipeline, setup.engine, ranks, setup.trained, setup.keeps_start_weights, setup.gpus, setup.run_dir
    )
    return backend_of(pipeline.engines[setup.engine]).build(start)
