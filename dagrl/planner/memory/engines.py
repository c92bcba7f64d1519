"""From a pipeline to the memory of each of its engines: what is asked of them, and what that takes."""

from __future__ import annotations

import math

from dagrl.backends.families.registry import engine_shape
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.config.schema import JudgeNode, PackingNode, Pipeline, TrainingNode
from dagrl.graph.offline import longest_row
from dagrl.graph.rollouts import longest_by_key, rollouts
from dagrl.models.gpus import Gpu
from dagrl.planner.memory.classifier import classifier_memory
from dagrl.planner.memory.estimate import EngineMemory
from dagrl.planner.memory.server import Serving, hf_memory, server_memory
from dagrl.planner.memory.trainer import Work, trainer_memory
from dagrl.scheduler.plan import Plan
from dagrl.scheduler.weight_route import weight_route


def engine_memory(pipeline: Pipeline, plan: Plan, executor: str, shape: ModelShape, gpu: Gpu | None) -> EngineMemory:
    """Of an executor of the plan, the engines that live on its ranks with it included. `shape` is that of the
    pipeline's model. `gpu` is None on CPU slots, where everything is the host's. ValueError where the model does not
    fit the layout, or nothing is known of its own.
    """
    spec, ours = pipeline.engines[executor], plan.executors[executor]
    if isinstance(spec, HfEngineSpec) and spec.head == "reward":
        return classifier_memory(pipeline, executor, shape, on_gpu=gpu is not None, sleeps=ours.sleeps)
    shape = engine_shape(pipeline, executor, shape)
    match spec:
        case MegatronEngineSpec():
            work = _work(pipeline, plan, executor)
            return trainer_memory(shape, spec, ours.ranks, work, sleeps=ours.sleeps, on_gpu=gpu is not None)
        case SglangEngineSpec():
            bucket = weight_route(pipeline, executor).bucket_bytes if spec.weights_from else 0
            serving = Serving(_longest(pipeline, executor), bucket, sleeps=ours.sleeps)
            return server_memory(shape, spec, gpu, serving)
        case HfEngineSpec():
            longest = _longest(pipeline, executor)
            return hf_memory(shape, spec, longest, on_gpu=gpu is not None, sleeps=ours.sleeps)
    raise AssertionError(f"no estimate for {spec!r}")


def _work(pipeline: Pipeline, plan: Plan, executor: str) -> Work:
    ours = plan.executors[executor]
    nodes = [node for node in pipeline.nodes.values() if getattr(node, "engine", None) in ours.engines]
    followers = [name for name, each in plan.executors.items() if each.weights_from == executor]
    longest = longest_row(pipeline)
    batch, prompts = 0, pipeline.data.prompts_per_step
    updates = [node for node in nodes if isinstance(node, TrainingNode)]
    for node in updates:
        batch = max(batch, (node.mini_batch or prompts) * plan.samples_per_prompt)

    def tokens(budget: int, rows: int) -> int:
        """A micro-batch at its budget, unless a replica has fewer rows than go in."""
        return min(budget, math.ceil(rows / ours.replicas) * longest)

    passes = [
        node.tokens_per_micro_batch
        for node in nodes
        if isinstance(node, PackingNode) and not isinstance(node, TrainingNode)
    ]
    return Work(
        update_tokens=max((tokens(node.tokens_per_micro_batch, batch) for node in updates), default=0),
        logprob_tokens=tokens(max(passes), prompts * plan.samples_per_prompt) if passes else 0,
        micro_batches=max(1, math.ceil(batch / ours.replicas)),
        bucket_bytes=max((weight_route(pipeline, name).bucket_bytes for name in followers), default=0),
        keeps_start_weights=len(ours.engines) > 1 and ours.trained,
    )


def _longest(pipeline: Pipeline, executor: str) -> int:
    """Tokens of the longest sample that the engine generates, or question and reply where it is a judge."""
    sampled = [
        max(longest_by_key(pipeline, name, validated=pipeline.run.validates).values())
        for name, node in rollouts(pipeline).items()
        if node.engine == executor
    ]
    asked = [node for node in pipeline.nodes.values() if isinstance(node, JudgeNode) and node.engine == executor]
    said = [node.max_prompt_tokens + node.sampling.max_new_tokens for node in asked]
    return max([*sampled, *said], default=0)
