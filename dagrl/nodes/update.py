"""``update``: trains an engine on the step's samples, one optimizer step for each mini-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagrl.algorithms.objective import PolicyObjective
from dagrl.data.stats import Stat
from dagrl.engines.base import TrainEngine
from dagrl.nodes.base import Context, Output, Part
from dagrl.spec.schema import UpdateNode


def update(parts: Sequence[Part], context: Context) -> Iterator[Output]:
    """Train on the mini-batches in order, and yield the metrics of all of them together."""
    engine: TrainEngine = context.engine
    node = context.node
    assert isinstance(node, UpdateNode)
    version = engine.policy_version
    objective = PolicyObjective(
        node.loss,
        context.temperature,
        available=parts[0].batch.columns.keys(),
        correction=node.rollout_correction,
        old_is_rollout=node.takes_rollout_for_old,
        longest_response=context.sampling.max_new_tokens,
    )
    stats = engine.update(
        [part.batch for part in parts] * node.epochs, objective, tokens_per_micro_batch=node.tokens_per_micro_batch
    )
    rows = np.concatenate([part.batch.rows for part in parts])
    staleness = np.concatenate([version - part.batch["policy_version"].values for part in parts])
    yield Output((), rows, {}, {**stats, "staleness": Stat.of(staleness)})
