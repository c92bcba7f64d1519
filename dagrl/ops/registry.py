"""Finds the function of an op by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from dagrl.ops.base import Op

_BUILT_IN = (
    "prompts",
    "rollout",
    "reward",
    "logprob",
    "advantage",
    "update",
    "values",
    "critic",
    "reward_model",
    "judge",
    "filter",
    "covariance",
    "sft",
    "dpo",
    "mix",
    "samples",
)


def load_op(name: str, folder: Path | None) -> Op:
    """The function of a built-in op, or the user's ``module:function`` (also searched in `folder`) as an op."""
    if name in _BUILT_IN:
        return getattr(import_module(f"dagrl.ops.{name}"), name)
    from dagrl.ops.custom import custom_op

    return custom_op(name, folder)
