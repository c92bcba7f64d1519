"""``agent``: the reward that an agent gave for its trajectory."""

from __future__ import annotations


def agent_reward(agent_reward: float | None) -> float:
    """The reward. Raises ValueError if the agent gave none."""
    if agent_reward is None:
        raise ValueError("the agent gave no reward; return a number, or a dict with `reward`")
    return agent_reward
