"""Names of the metrics that the nodes of a validation write, for what is asked of them before a run."""

from __future__ import annotations

from dagrl.config.schema import (
    DpoNode,
    JudgeNode,
    NodeBase,
    Pipeline,
    RewardModelNode,
    RewardNode,
    RolloutNode,
    SftNode,
)
from dagrl.graph.dag import Graph
from dagrl.graph.val_metrics import set_prefixes

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
            names = [] if column == "reward" else [f"reward/{column}"]
            if isinstance(node, JudgeNode):
                names += ["judge/failed_fraction", "judge/reply_tokens"]
            elif isinstance(node, RewardModelNode):
                names.append("reward/cut_fraction")
            elif node.on_error != "stop":
                names.append("reward/failed_fraction")
            return tuple(names)
        case SftNode():
            return ("loss/sft",)
        case DpoNode():
            return _DPO
    return ()
