"""Applies an advantage node's length rewards and penalties, before advantages are computed."""

from __future__ import annotations

import numpy as np

from dagrl.algorithms.reward_shaping import cosine_rewards, length_rewards, overlong_penalty
from dagrl.config.schema import AdvantageNode
from dagrl.data.batch import Batch
from dagrl.data.stats import Stat


def shaped_rewards(node: AdvantageNode, batch: Batch, *, longest: int) -> tuple[np.ndarray, dict[str, Stat]]:
    """Rewards with all length terms of the node, float64 [S], and statistics of the terms.

    `longest` bounds one row: terms that compare with it take a trajectory's longest one.
    """
    rewards = batch["reward"].values.astype(np.float64)
    longest_rows = batch["longest_row"].values
    stats: dict[str, Stat] = {}
    if (cosine := node.cosine_reward) is not None:
        rewards = cosine_rewards(
            rewards > cosine.right_above,
            longest_rows,
            longest=longest,
            right_from_to=cosine.right,
            wrong_from_to=cosine.wrong,
            exceeded=cosine.exceeded,
        )
        stats["reward/cosine"] = Stat.of(rewards)
    points = np.zeros(len(rewards))
    if (shorter := node.length_reward) is not None:
        right = batch["reward"].values > shorter.right_above
        given = shorter.coef * length_rewards(right, batch["length"].values, batch["group_id"].values)
        stats["reward/length"] = Stat.of(given)
        points += given
    if (buffer := node.overlong_buffer) is not None:
        penalty = overlong_penalty(longest_rows, longest=longest, buffer=buffer.len, factor=buffer.penalty_factor)
        stats["reward/overlong"] = Stat.of(penalty)
        points += penalty
    return rewards + points, stats
