"""Questions that several tables of slime ask."""

from __future__ import annotations

from typing import Any

from dagrl.importing.table import Translation, is_known


def uses_critic(t: Translation) -> bool:
    """Return whether there is a critic."""
    return t.get("--advantage-estimator") == "ppo"


def validates(t: Translation) -> bool:
    """Return whether there are validations."""
    return bool(t.number("--eval-interval")) and is_known(t.get("--eval-prompt-data"))


def steps_per_rollout(t: Translation) -> int:
    """Return the optimizer steps of a rollout."""
    prompts, mini = t.tree.get("data.prompts_per_step"), t.tree.get("nodes.update.mini_batch")
    return -(-prompts // mini) if isinstance(prompts, int) and isinstance(mini, int) else 1


def function_name(path: Any) -> str:
    """Return ``module:function`` for a dotted path."""
    module, _, name = str(path).rpartition(".")
    return f"{module}:{name}"
