"""Role-conditioned advantage estimation: a moving average of rewards for each role, in float64 numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dagrl.data.batch import Column


def rae_advantages(
    rewards: np.ndarray, roles: Sequence[str], mask: Column, *, baselines: Mapping[str, float], decay: float
) -> tuple[Column, dict[str, float]]:
    """Each reward minus the baseline of its role, which then moves towards the reward.

    Role-conditioned advantage estimation (RAE) of SPIRAL (arXiv 2506.24119): one response after the other, A = r - b,
    then b = decay b + (1 - decay) r. So players of a game, whose rewards differ by their role, are each compared with
    their own past.

    `rewards` [S] and `roles` are in the order of responses. `baselines` are those before them; a new role's is 0.
    Returns the advantages, float32, ragged as `mask` and 0 where it is 0, and the baselines of all roles after the last
    response. Raises ValueError if a reward is not finite.
    """
    moved = dict(baselines)
    advantages = np.zeros(len(mask))
    for place, (role, reward) in enumerate(zip(roles, np.asarray(rewards, dtype=np.float64).tolist(), strict=True)):
        if not np.isfinite(reward):
            raise ValueError(f"a reward is {reward}; rewards must be finite numbers")
        before = moved.get(role, 0.0)
        advantages[place] = reward - before
        moved[role] = decay * before + (1 - decay) * reward
    values = np.repeat(advantages, mask.lengths) * (mask.values > 0)
    return Column(values.astype(np.float32), mask.offsets), moved
