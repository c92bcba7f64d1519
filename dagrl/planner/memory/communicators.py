"""The communicators of a trainer on several GPUs: how many it connects, and what they hold of each device.

NCCL connects one when its ranks first meet in it. Counted is what the engine was seen to use in each layout: while it
is built, in a pass, in an update. See `dagrl.backends.megatron.engine.communicators`; groups of one rank have none.
"""

from __future__ import annotations

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.section import ParallelSpec
from dagrl.planner.memory.estimate import GIB

_COMMUNICATOR = 0.53 * GIB
"""Buffers of one; measured on H200s with two ranks, 0.53 GiB. Kept, they were 2.13 GiB with DP2, which has four."""
_STAGES = 0.26 * GIB
"""More of one whose ranks also send to each other one by one: 0.79 GiB in all between pipeline stages (H200s)."""
_RING = 0.32 * GIB
"""The same for the ring of context parallelism: 0.85 GiB in all (H200s)."""
_GATHERED = 0.4 * GIB
"""The same for tensor-parallel ranks that gather weights for a sync: 0.38 to 0.44 GiB (H200s)."""


def communicator_bytes(
    shape: ModelShape, parallel: ParallelSpec, ranks: int, *, trains: bool, sends: bool, closes: bool
) -> int:
    """On each GPU of an engine that `trains` and `sends` its weights, or does not. One that `closes` them in each sleep
    opens again those of its passes and updates alone.
    """
    if ranks == 1:
        return 0
    count = groups_of_pass(shape, parallel, ranks)
    if trains:
        # An optimizer that is built asks all ranks what they have, once.
        count += groups_of_update(shape, parallel, ranks) + (not closes)
    found = count * _COMMUNICATOR
    found += _STAGES if parallel.pipeline_model_parallel_size > 1 else 0
    found += _RING if parallel.context_parallel_size > 1 else 0
    found += _GATHERED if sends and not closes and parallel.tensor_model_parallel_size > 1 else 0
    return int(found)


def groups_of_pass(shape: ModelShape, parallel: ParallelSpec, ranks: int) -> int:
    """How many groups of several ranks meet in a pass; compare backends/megatron/engine/test_plan_communicators.py."""
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
