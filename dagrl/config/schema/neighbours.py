"""Engines that depend on each other: sleep beside others of their group, and replay of a generator's routes."""

from __future__ import annotations

from dagrl.config.schema import Pipeline, RolloutNode


def neighbours(pipeline: Pipeline, name: str) -> list[str]:
    """The other engines on the slots of this engine's group, each on its own ranks."""
    group = pipeline.engines[name].group
    return [other for other, spec in pipeline.engines.items() if group and spec.group == group and other != name]


def sleeps(pipeline: Pipeline, name: str) -> bool:
    """Whether the engine sleeps. False for an engine on the ranks of another, which sleeps with that one."""
    engine = pipeline.engines[name]
    if engine.group is None or not neighbours(pipeline, name):
        return False
    # Host memory is what CPU slots share, and leaving it for host memory gains nothing.
    return not pipeline.groups[engine.group].is_cpu if engine.sleep == "auto" else engine.sleep


def stays_beside_sleepers(pipeline: Pipeline, name: str) -> bool:
    """Whether the engine keeps its place on its devices while others of its group come and go."""
    return not sleeps(pipeline, name) and any(sleeps(pipeline, other) for other in neighbours(pipeline, name))


def wants_routed_experts(pipeline: Pipeline, name: str) -> bool:
    """Whether the engine samples responses whose routes another engine replays."""
    samples = any(isinstance(node, RolloutNode) and node.engine == name for node in pipeline.nodes.values())
    return samples and any(engine.replays_routes for engine in pipeline.engines.values())
