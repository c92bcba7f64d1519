"""``environment``: the sum of the environment's rewards in a multi-turn rollout."""

from __future__ import annotations

from collections.abc import Sequence


def environment_reward(turn_rewards: Sequence[float]) -> float:
    """Sum of the turns' rewards. Raises ValueError without any."""
    if not turn_rewards:
        raise ValueError("the response has no turn rewards; its rollout has no `environment`")
    return float(sum(turn_rewards))
