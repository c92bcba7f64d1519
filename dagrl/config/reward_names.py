"""Built-in rewards, by their names in a pipeline."""

from __future__ import annotations

BUILT_IN_REWARDS = {
    "agent": "dagrl.rewards.given:agent_reward",
    "code": "dagrl.rewards.code.reward:code_reward",
    "environment": "dagrl.rewards.given:environment_reward",
    "exact": "dagrl.rewards.exact:exact_reward",
    "math": "dagrl.rewards.math:math_reward",
}
"""Name -> ``module:function``. The modules import little, because `args` are checked against the function before a
run."""
