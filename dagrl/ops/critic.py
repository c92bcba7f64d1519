"""``critic``: trains a critic towards the step's returns, one optimizer step per mini-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagrl.algorithms.value_loss import ValueObjective, with_explained_variance
from dagrl.config.schema import CriticNode
from dagrl.ops.base import Context, OpInput, Output

_OWN = "critic/"


def critic(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Train on the mini-batches in order, and yield their common metrics.

    Stale samples are used too: ``schedule.stale_samples`` does not apply to a critic.
    """
    node = context.declared(CriticNode)
    objective = ValueObjective(
        cliprange=node.cliprange_value,
        aggregation=node.aggregation,
        longest_response=context.longest_response,
        has_shares="trajectory_share" in parts[0].batch,
    )
    stats = context.train([part.batch for part in parts], objective)
    # The policy reports metrics such as the learning rate by the same names.
    metrics = {
        name if name.startswith(_OWN) else _OWN + name: stat for name, stat in with_explained_variance(stats).items()
    }
    yield Output((), np.concatenate([part.batch.rows for part in parts]), {}, metrics)
