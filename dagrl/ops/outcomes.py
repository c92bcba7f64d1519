"""Outcomes of the prompts of a batch, for the order of later steps."""

from __future__ import annotations

import numpy as np

from dagrl.config.schema.data import DataSpec
from dagrl.data.batch import Batch
from dagrl.data.order.sampler import GroupOutcomes


def group_outcomes(batch: Batch, data: DataSpec) -> GroupOutcomes | None:
    """The means over each group of a batch. None if the order does not learn from them."""
    if not data.order_learns:
        return None
    groups, place, counts = np.unique(batch["group_id"].values, return_inverse=True, return_counts=True)

    def means(values: np.ndarray) -> np.ndarray:
        return np.bincount(place, weights=values, minlength=len(groups)) / counts

    rewards = passes = advantages = np.full(len(groups), np.nan)
    if "reward" in batch:
        values = batch["reward"].values.astype(np.float64)
        rewards, passes = means(values), means((values >= data.val_pass_reward).astype(np.float64))
    if "advantage" in batch:
        advantages = means(np.array([_mean_abs(batch["advantage"][row]) for row in range(len(batch))]))
    return GroupOutcomes(groups, rewards, passes, advantages)


def _mean_abs(values: np.ndarray) -> float:
    return float(np.abs(values).mean()) if len(values) else 0.0
