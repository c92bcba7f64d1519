"""Seconds for the communicators of a trainer whose ranks sleep: closed all at once, opened one by one in its tasks.

NCCL connects each when it is first used after a wake: those of the model's own parallelism in the first pass, those
between replicas in the first update. What is counted is what the engine was seen to use in a pass and in an update of
each layout; see `dagrl.engines.megatron.communicators`.
"""

from __future__ import annotations

from dagrl.spec.models.shape import ModelShape
from dagrl.spec.schema import ParallelSpec

_CLOSE_S = 0.42
"""To close all of them: 0.34 to 0.49 s with two ranks, whatever the layout."""
_CONNECT_S = 0.12
"""To connect one: the first log-probs after a wake take 0.08 to 0.15 s longer, 1.7B and 8B, TP2 and PP2."""
_CONNECT_PAIRS_S = 0.07
"""To connect ranks in pairs, over which a sync's shards are gathered: 0.03 to 0.05 s with TP2, 0.1 s with PP2."""


def closing_seconds(ranks: int) -> float:
    """Of an engine on so many GPUs that goes to sleep. One alone has nothing to close."""
    return _CLOSE_S if ranks > 1 else 0.0


def connecting_seconds(shape: ModelShape, parallel: ParallelSpec, ranks: int, *, updates: bool) -> float:
    """What the first pass after a wake takes longer; or, with `updates`, what an update takes beside that."""
    return _CONNECT_S * (groups_of_update if updates else groups_of_pass)(shape, parallel, ranks)


def gathering_seconds(ranks: int) -> float:
    """What the first sync after a wake takes longer, of weights shared by so many ranks."""
    return _CONNECT_PAIRS_S if ranks > 1 else 0.0


def groups_of_pass(shape: ModelShape, parallel: ParallelSpec, ranks: int) -> int:
    """How many groups of several ranks meet in a pass; tests/engines/megatron/test_plan_communicators.py looks on."""
    sizes = [
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    ]
    if shape.experts is not None:
        experts, whole = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
        # Ranks of different experts, of parts of one, of either; and replicas, which compare their micro-batches.
        sizes += [experts, whole, experts * whole, parallel.data_parallel_size(ranks)]
    return _shared(sizes)


def groups_of_update(shape: ModelShape, parallel: ParallelSpec, ranks: int) -> int:
    """And how many further ones during an update."""
    replicas, stages = parallel.data_parallel_size(ranks), parallel.pipeline_model_parallel_size
    sizes = [
        ranks,  # The gradient's norm.
        replicas * parallel.context_parallel_size,  # Gradients, and the weights after the step.
    ]
    if shape.tied:
        sizes.append(stages)  # The gradient of an embedding that is the output layer too.
    if shape.experts is None:
        sizes.append(replicas)  # What the loss is divided by. A mixture's replicas have met in the pass.
    elif _experts_lie_apart(parallel):
        experts = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
        sizes.append(ranks // stages // experts)
    return _shared(sizes)


def _experts_lie_apart(parallel: ParallelSpec) -> bool:
    """Whether other ranks hold the same of experts than of the rest, so that Megatron joins them by themselves."""
    split = parallel.expert_tensor_parallel_size != parallel.tensor_model_parallel_size
    return split or parallel.expert_model_parallel_size > 1


def _shared(sizes: list[int]) -> int:
    return sum(size > 1 for size in sizes)
