"""Turns the declaration of an engine into the engine, inside the worker that will hold it."""

from __future__ import annotations

from typing import Any

from dagrl.engines.base import RankContext
from dagrl.runtime.messages import StartEngine
from dagrl.spec.schema import HfEngineSpec, MegatronEngineSpec


def make_engine(setup: StartEngine, listen_fd: int | None) -> Any:
    """Build the rank of the engine that `setup` names; imports its backend only here.

    `listen_fd` is rank 0's socket, on which the ranks meet.
    """
    pipeline = setup.pipeline
    assert setup.engine is not None
    spec = pipeline.engines[setup.engine]
    ranks = RankContext(
        rank=setup.rank,
        world_size=setup.world_size,
        master_addr=setup.master_addr,
        master_port=setup.master_port,
        timeout_s=pipeline.run.node_timeout_s,
        seed=pipeline.run.seed,
        listen_fd=listen_fd,
    )
    match spec:
        case MegatronEngineSpec():
            from dagrl.engines.megatron.engine import MegatronEngine

            return MegatronEngine(
                pipeline.model,
                spec,
                ranks,
                train_steps=pipeline.run.steps,
                trainable=setup.trained,
                keep_start_weights=setup.keeps_start_weights,
            )
        case HfEngineSpec():
            from dagrl.engines.hf.engine import HfEngine

            return HfEngine(pipeline.model, spec, ranks)
    raise AssertionError(f"no engine for {spec!r}")
