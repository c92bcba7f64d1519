"""Router replay (R3): engines that send tokens to the experts that the generator sent them to."""

from __future__ import annotations

from dagrl.config.schema import Pipeline, RolloutNode


def wants_routed_experts(pipeline: Pipeline, name: str) -> bool:
    """Whether the engine samples responses whose routes another engine replays."""
    samples = any(isinstance(node, RolloutNode) and node.engine == name for node in pipeline.nodes.values())
    return samples and any(engine.replays_routes for engine in pipeline.engines.values())
