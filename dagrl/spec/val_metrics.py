"""Which metrics a validation has: what `dagrl.nodes.validation` measures, and what may be asked for before a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dagrl.spec.graph import Graph
from dagrl.spec.rollouts import leading_rollout, rollouts
from dagrl.spec.schema import DpoNode, JudgeNode, NodeBase, Pipeline, RewardModelNode, RewardNode, RolloutNode, SftNode

VOTES = ("math", "exact")
"""Rewards that say which part of a response is its answer, so that answers can be counted."""


@dataclass(frozen=True, slots=True)
class Vote:
    """How the answer in a response is found."""

    fn: str
    """One of `VOTES`, or ``module:function``."""
    args: dict[str, Any] = field(default_factory=dict)
    """Of the reward."""


def vote_of(pipeline: Pipeline) -> Vote | None:
    """What the file says, or else what its first reward with an answer to compare does."""
    rewards = [node for node in pipeline.nodes.values() if isinstance(node, RewardNode) and node.fn in VOTES]
    named = pipeline.data.val_vote
    if named is None:
        return Vote(rewards[0].fn, rewards[0].args) if rewards else None
    return next((Vote(node.fn, node.args) for node in rewards if node.fn == named), Vote(named))


def val_n(pipeline: Pipeline) -> int:
    """Responses to each validation prompt."""
    return rollouts(pipeline)[leading_rollout(pipeline)].val_n


def set_prefixes(pipeline: Pipeline) -> dict[str, str]:
    """Validation set -> what comes before the names of its metrics, behind ``val/``; nothing for one without a name."""
    named = isinstance(pipeline.data.val, dict)
    return {name: f"{name}/" if named else "" for name in pipeline.data.val_sets}


def ks_of(n: int) -> tuple[int, ...]:
    """The k that are told of n responses: powers of two, and n itself."""
    powers = [1 << power for power in range(n.bit_length()) if 1 << power < n]
    return (*powers, n)


def names_at_k(n: int, *, votes: bool) -> list[str]:
    """Metrics of a validation set with n responses to each prompt, without the set's prefix."""
    names = [f"mean@{n}", *(f"pass@{k}" for k in ks_of(n))]
    if n > 1:
        kinds = ("best", "worst", "maj") if votes else ("best", "worst")
        names += [f"std@{n}", *(f"{kind}@{k}" for kind in kinds for k in ks_of(n)[1:])]
    return names


_SAMPLED = ("reward/mean", "reward/std", "response_tokens/mean", "response_tokens/max", "response_tokens/cut_fraction")
_GIVEN = ("demonstration_tokens/mean", "demonstration_tokens/max")
_PROMPTS = ("data/dropped_prompts", "data/cut_prompts")
_TURNS = ("turns/mean", "turns/max", "turns/out_of_turns_fraction", "turns/observation_token_fraction")
_TOOLS = ("tools/calls_per_response", "tools/failed_fraction")
_ENVIRONMENT = ("environment/reward/mean", "environment/reward/std", "environment/failed_fraction")
_DPO = ("loss/dpo", "loss/sft", "dpo/chosen_reward", "dpo/rejected_reward", "dpo/margin", "dpo/accuracy")


def names_written(pipeline: Pipeline, validation: Graph) -> list[str]:
    """Metrics of the nodes that run in a validation, without ``val/`` and without those of `names_at_k`.

    Nodes of the same kind put their own name, and a slash, before theirs.
    """
    sampled = any(isinstance(node.spec, RolloutNode) for node in validation.nodes.values())
    names = [*_PROMPTS, *(_SAMPLED if sampled else _GIVEN)]
    for name, node in validation.nodes.items():
        own = _names_of(node.spec) if node.spec is not None else ()
        names += [*own, *(f"{name}/{each}" for each in own)]
        if isinstance(node.spec, RolloutNode):
            names += [f"{name}/response_tokens/mean", f"{name}/response_tokens/max"]
    if sampled:
        prefixes = [prefix for prefix in set_prefixes(pipeline).values() if prefix]
        names += [f"{prefix}response_tokens/{detail}" for prefix in prefixes for detail in ("mean", "max")]
    return names


def _names_of(node: NodeBase) -> tuple[str, ...]:
    match node:
        case RolloutNode():
            tools, environment = _TOOLS if node.tools else (), _ENVIRONMENT if node.environment else ()
            return (*_TURNS, *tools, *environment) if node.multi_turn else ()
        case RewardNode() | RewardModelNode() | JudgeNode():
            column = node.written_as("reward")
            others = ("judge/failed_fraction", "judge/reply_tokens") if isinstance(node, JudgeNode) else ()
            others += ("reward/cut_fraction",) if isinstance(node, RewardModelNode) else ()
            failed = isinstance(node, RewardNode) and node.on_error != "stop"
            others += ("reward/failed_fraction",) if failed else ()
            return others if column == "reward" else (*others, f"reward/{column}")
        case SftNode():
            return ("loss/sft",)
        case DpoNode():
            return _DPO
    return ()
