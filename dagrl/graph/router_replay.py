"""Router replay (R3): who tells where tokens were routed, and who routes them there again."""

from __future__ import annotations

from dagrl.config.schema import EngineSpec, MegatronEngineSpec, Pipeline, RolloutNode, SglangEngineSpec

SERVER_FIELD = "enable_return_routed_experts"
"""Field of ``server`` that makes SGLang tell of routed experts."""


def tells_routes(pipeline: Pipeline, name: str) -> bool:
    """Whether the engine samples what another engine routes again."""
    samples = any(isinstance(node, RolloutNode) and node.engine == name for node in pipeline.nodes.values())
    return samples and any(replays(engine) for engine in pipeline.engines.values())


def replays(engine: EngineSpec | None) -> bool:
    """Whether the engine routes tokens as they were routed when they were sampled."""
    return isinstance(engine, MegatronEngineSpec) and engine.router_replay


def engine_as_started(pipeline: Pipeline, name: str) -> EngineSpec:
    """An engine as it is to be built: a server that is to tell of routed experts is told so."""
    engine = pipeline.engines[name]
    if isinstance(engine, SglangEngineSpec) and tells_routes(pipeline, name):
        return engine.model_copy(update={"server": {**engine.server, SERVER_FIELD: True}})
    return engine
