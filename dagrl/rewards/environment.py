"""``environment``: what the environment of a rollout of several turns has given for them."""

from __future__ import annotations

from collections.abc import Sequence


def environment_reward(turn_rewards: Sequence[float]) -> float:
    """The sum over the turns. ValueError where there are none."""
    if not turn_rewards:
        raise ValueError("the response has no rewards of turns; its rollout has no `environment`")
    return float(sum(turn_rewards))
