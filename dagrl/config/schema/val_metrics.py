"""Names of the metrics of a validation, which `dagrl.ops.samples` measures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dagrl.config.schema import Pipeline, RewardNode

VOTES = ("math", "exact")
"""Rewards that say which part of a response is its answer, so that answers can be counted."""


@dataclass(frozen=True, slots=True)
class Vote:
    """How the answer in a response is found."""

    fn: str
    """One of `VOTES`, or ``module:function``."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reward."""


def vote_of(pipeline: Pipeline) -> Vote | None:
    """``data.val_vote``, or else the first reward that extracts an answer."""
    nodes = [node for node in pipeline.nodes.values() if isinstance(node, RewardNode)]
    rewards = [function for node in nodes for function in node.functions.values() if function.fn in VOTES]
    named = pipeline.data.val_vote
    if named is None:
        return Vote(rewards[0].fn, rewards[0].args) if rewards else None
    return next((Vote(node.fn, node.args) for node in rewards if node.fn == named), Vote(named))


def ks_of(n: int) -> tuple[int, ...]:
    """Values of k for n responses: powers of two, and n itself."""
    powers = [1 << power for power in range(n.bit_length()) if 1 << power < n]
    return (*powers, n)


def names_at_k(n: int, *, votes: bool) -> list[str]:
    """Metrics of a validation set with n responses to each prompt, without the set's prefix."""
    names = [f"mean@{n}", *(f"pass@{k}" for k in ks_of(n))]
    if n > 1:
        kinds = ("best", "worst", "maj") if votes else ("best", "worst")
        names += [f"std@{n}", *(f"{kind}@{k}" for kind in kinds for k in ks_of(n)[1:])]
    return names
