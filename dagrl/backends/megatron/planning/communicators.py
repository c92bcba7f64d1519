"""The communicators of a trainer on several GPUs: how many it connects, their memory, and their seconds.

NCCL connects a communicator when its ranks first meet in it. The counts are those that the engine was seen to use in
each layout, in a pass and in an update; see `dagrl.backends.megatron.engine.communicators`. Groups of one rank have no
communicator. An engine that closes them when it sleeps connects again those of its passes and updates, task by task.
"""

from __future__ import annotations

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.section import ParallelSpec
from dagrl.backends.planning.memory import GIB

_COMMUNICATOR = 0.53 * GIB
"""Buffers of one; measured on H200s with two ranks, 0.53 GiB. Kept, they were 2.13 GiB with DP2, which has four."""
_STAGES = 0.26 * GIB
"""In addition, if its ranks also send to each other in pairs: 0.79 GiB in all between pipeline stages (H200s)."""
_RING = 0.32 * GIB
"""The same for the ring of context parallelism: 0.85 GiB in all (H200s)."""
_GATHERED = 0.4 * GIB
"""The same for tensor-parallel ranks that gather weights for a sync: 0.38 to 0.44 GiB (H200s)."""
CLOSE_S = 0.42
"""Seconds to close all of them: 0.34 to 0.49 s with two ranks in any layout."""
CONNECT_S = 0.12
"""Seconds to connect one: the first log-probs after a wake take 0.08 to 0.15 s longer, 1.7B and 8B, TP2 and PP2."""
CONNECT_PAIRS_S = 0.07
"""Seconds to connect ranks in pairs, which gather the shards of a sync: 0.03 to 0.05 s with TP2, 0.1 s with PP2."""


def communicator_bytes(
    shape: ModelShape, parallel: ParallelSpec, ranks: int, *, trains: bool, sends: bool, closes: bool
) -> int:
    """Return the bytes on each GPU of an engine that trains, sends its weights, or closes communicators in a sleep."""
    if ranks == 1:
        return 0
    count = groups_of_pass(shape, parallel, ranks)
    if trains:
        # An optimizer gathers the states of all ranks once, when it is built.
        count += groups_of_update(shape, parallel, ranks) + (not closes)
    found = count * _COMMUNICATOR
    found += _STAGES if parallel.pp > 1 else 0
    found += _RING if parallel.cp > 1 else 0
    found += _GATHERED if sends and not closes and parallel.tp > 1 else 0
    return int(found)


def groups_of_pass(shape: ModelShape, parallel: ParallelSpec, ranks: int) -> int:
    """Count the groups of several ranks that meet in a pass."""
    sizes = [parallel.tp, parallel.pp, parallel.cp]
    if shape.experts is not None:
        # Ranks of different experts, of parts of one, of either; and replicas, which compare their micro-batches.
        sizes += [parallel.ep, parallel.etp, parallel.expert_ranks, parallel.data_parallel_size(ranks)]
    return _shared(sizes)


def groups_of_update(shape: ModelShape, parallel: ParallelSpec, ranks: int) -> int:
    """Count the further groups that meet in an update."""
    replicas, stages = parallel.data_parallel_size(ranks), parallel.pp
    sizes = [
        ranks,  # The norm of the gradient.
        replicas * parallel.cp,  # Gradients, and the weights after the step.
    ]
    if shape.tied:
        sizes.append(stages)  # The gradient of an embedding that is the output layer too.
    if shape.experts is None:
        sizes.append(replicas)  # The divisor of the loss. The replicas of a mixture have met in the pass.
    elif parallel.etp != parallel.tp or parallel.ep > 1:
        # Other ranks hold the same experts than hold the same of the rest, so Megatron has a group for each.
        sizes.append(ranks // stages // parallel.expert_ranks)
    return _shared(sizes)


def _shared(sizes: list[int]) -> int:
    return sum(size > 1 for size in sizes)
