"""Seconds for the communicators of a trainer whose ranks sleep: closed all at once, opened one by one in its tasks.

NCCL connects each when it is first used after a wake: those of the model's own parallelism in the first pass, those
between replicas in the first update. How many that are, `dagrl.planner.memory.communicators` counts.
"""

from __future__ import annotations

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.section import ParallelSpec
from dagrl.planner.memory.communicators import groups_of_pass, groups_of_update

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
