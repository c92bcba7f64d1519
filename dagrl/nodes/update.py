"""``update``: trains an engine on the step's samples, one optimizer step for each mini-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagrl.algorithms.objective import PolicyObjective
from dagrl.engines.base import TrainEngine
from dagrl.nodes.base import Context, Output, Part
from dagrl.nodes.stale import without_stale
from dagrl.spec.schema import UpdateNode


def update(parts: Sequence[Part], context: Context) -> Iterator[Output]:
    """Train on the mini-batches in order, and yield the metrics of all of them together."""
    engine: TrainEngine = context.engine
    node = context.node
    assert isinstance(node, UpdateNode)
    objective = PolicyObjective(
        node.loss,
        context.temperature,
        available=parts[0].batch.columns.keys(),
        correction=node.rollout_correction,
        old_is_rollout=node.takes_rollout_for_old,
        longest_response=context.sampling.max_new_tokens,
    )
    batches, ages = without_stale([part.batch for part in parts], engine.policy_version, context)
    stats = engine.update(
        [*batches] * node.epochs,
        objective,
        tokens_per_micro_batch=node.tokens_per_micro_batch,
        begins=context.begins,
        ends=context.ends,
    )
    yield Output((), np.concatenate([part.batch.rows for part in parts]), {}, stats | ages)
