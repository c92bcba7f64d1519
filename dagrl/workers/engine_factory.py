"""Turns the declaration of an engine into the engine, inside the worker that will hold it."""

from __future__ import annotations

import os
from typing import Any

from dagrl.backends.base import RankContext
from dagrl.backends.sglang.layout import nodes_per_server, server_slots
from dagrl.config.schema import HfEngineSpec, MegatronEngineSpec, SglangEngineSpec
from dagrl.graph.router_replay import engine_as_started
from dagrl.graph.sleeping import sleeps, stays_beside_sleepers
from dagrl.imports import lean_imports
from dagrl.workers.messages import StartEngine


def make_engine(setup: StartEngine, listen_fd: int | None) -> Any:
    """Build the rank of the engine that `setup` names; imports its backend only here.

    `listen_fd` is a socket on which the ranks meet, where that is here.
    """
    pipeline = setup.pipeline
    assert setup.engine is not None
    spec, model = engine_as_started(pipeline, setup.engine), pipeline.model_of(setup.engine)
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
            with lean_imports(for_good=True):
                from dagrl.backends.megatron.engine.megatron_engine import MegatronEngine

            return MegatronEngine(
                model,
                spec,
                ranks,
                train_steps=pipeline.run.steps,
                trainable=setup.trained,
                keep_start_weights=setup.keeps_start_weights,
                keeps_no_cache=stays_beside_sleepers(pipeline, setup.engine),
            )
        case HfEngineSpec() if spec.head == "reward":
            with lean_imports(for_good=True):
                from dagrl.backends.hf.classifier import HfClassifier

            return HfClassifier(model, spec, ranks)
        case HfEngineSpec():
            with lean_imports(for_good=True):
                from dagrl.backends.hf.engine import HfEngine

            return HfEngine(model, spec, ranks)
        case SglangEngineSpec():
            return _sglang_engine(setup, spec, ranks)
    raise AssertionError(f"no engine for {spec!r}")


def _sglang_engine(setup: StartEngine, spec: SglangEngineSpec, ranks: RankContext) -> Any:
    """The worker on the first slot of a server speaks for it, the first on a further machine starts its processes."""
    with lean_imports(for_good=True):
        from dagrl.backends.sglang.engine import SglangEngine
        from dagrl.backends.sglang.share import ServerShare
        from dagrl.backends.sglang.slot import HeldSlot, NodeShare

    pipeline = setup.pipeline
    group = pipeline.groups[spec.group]
    slot = server_slots(spec, group)[setup.rank]
    if ranks.listen_fd is not None:
        # SGLang listens on the port itself, which nobody else has taken so far.
        os.close(ranks.listen_fd)
    if not slot.starts:
        return HeldSlot()
    if setup.gpus:
        # Before anybody asks CUDA for its devices: SGLang's processes see those of the whole server.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(setup.gpus)
    share = ServerShare(
        name=f"{setup.engine}/{slot.server}",
        server=slot.server,
        node=slot.node,
        nodes=nodes_per_server(spec, group),
        gpus=setup.gpus,
        address=setup.master_addr,
        port=setup.master_port,
        logs=setup.run_dir / "logs",
        # The engine knows better than the driver what it has waited for, so it speaks first.
        start_timeout_s=0.95 * pipeline.run.start_timeout_s,
    )
    kind = SglangEngine if slot.leads else NodeShare
    return kind(pipeline.model_of(str(setup.engine)), spec, ranks, share, sleeps=sleeps(pipeline, str(setup.engine)))
