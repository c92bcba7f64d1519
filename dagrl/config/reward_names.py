"""Rewards that come with dagrl, by the names that a pipeline gives them."""

from __future__ import annotations

BUILT_IN_REWARDS = {
    "agent": "dagrl.rewards.given:agent_reward",
    "code": "dagrl.rewards.code.reward:code_reward",
    "environment": "dagrl.rewards.given:environment_reward",
    "exact": "dagrl.rewards.exact:exact_reward",
    "math": "dagrl.rewards.math:math_reward",
}
"""Name -> where the function is. Their modules are light: that `args` fit is checked before a run."""
