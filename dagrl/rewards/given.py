"""``agent`` and ``environment``: rewards that a rollout has brought with it."""

from __future__ import annotations

from collections.abc import Sequence


def agent_reward(agent_reward: float | None) -> float:
    """The reward that an agent gave for its trajectory. Raises ValueError if it gave none."""
    if agent_reward is None:
        raise ValueError("the agent gave no reward; return a number, or a dict with `reward`")
    return agent_reward


def environment_reward(turn_rewards: Sequence[float]) -> float:
    """The sum of the environment's rewards in a multi-turn rollout. Raises ValueError without any."""
    if not turn_rewards:
        raise ValueError("the response has no turn rewards; its rollout has no `environment`")
    return float(sum(turn_rewards))
