"""Rules within a node, or between a node and the rest of the file, that are not about columns or engines."""

from __future__ import annotations

from pathlib import Path

from dagrl.spec.custom import check_arguments, fields_of, load_function
from dagrl.spec.errors import Place, dotted, suggest
from dagrl.spec.positions import Findings
from dagrl.spec.rollouts import leading_rollout, rollouts
from dagrl.spec.schema import (
    AdvantageNode,
    CustomNode,
    Pipeline,
    RewardNode,
    RolloutNode,
    SamplingSpec,
    UpdateNode,
)

OWN_REWARDS = ("math", "exact")
"""Rewards that come with dagrl."""


def check_nodes(pipeline: Pipeline, folder: Path, findings: Findings) -> None:
    """Report what is wrong with rewards, own ops, sampling and formulas; `folder` holds the user's own modules."""
    for name, node in pipeline.nodes.items():
        place: Place = ("nodes", name)
        if isinstance(node, RewardNode):
            _check_reward(place, node, folder, findings)
        elif isinstance(node, CustomNode):
            _check_op(place, node, folder, findings)
        elif isinstance(node, RolloutNode):
            _check_sampling((*place, "sampling"), node.sampling, findings)
            if node.sampling.temperature == 0:
                message = "0 always draws the same response, and nothing can be learned from that; choose 1.0 or so"
                findings.error((*place, "sampling", "temperature"), message)
            if node.val_sampling is not None:
                _check_sampling((*place, "val_sampling"), node.val_sampling, findings)
            if name == leading_rollout(pipeline):
                _check_group_size(pipeline, place, node, findings)
        elif isinstance(node, AdvantageNode):
            _check_advantage(pipeline, place, node, findings)
        elif isinstance(node, UpdateNode):
            _check_loss(pipeline, place, node, findings)


def _check_reward(place: Place, node: RewardNode, folder: Path, findings: Findings) -> None:
    if ":" not in node.fn:
        if node.fn not in OWN_REWARDS:
            message = f"there is no reward `{node.fn}` (your own is written `module:function`); "
            findings.error((*place, "fn"), message + suggest(node.fn, OWN_REWARDS))
        return
    try:
        function = load_function(node.fn, folder)
    except ValueError as error:
        findings.error((*place, "fn"), str(error))
        return
    try:
        fields_of(function, node.args)
    except ValueError as error:
        findings.error((*place, "args") if node.args else (*place, "fn"), str(error))


def _check_op(place: Place, node: CustomNode, folder: Path, findings: Findings) -> None:
    try:
        function = load_function(node.op, folder)
    except ValueError:
        return  # `infer_graph` says what is wrong.
    try:
        check_arguments(function, node.op, node.args)
    except ValueError as error:
        findings.error((*place, "args") if node.args else (*place, "op"), str(error))


def _check_sampling(place: Place, sampling: SamplingSpec, findings: Findings) -> None:
    if sampling.top_k == 0 or sampling.top_k < -1:
        findings.error((*place, "top_k"), f"{sampling.top_k} tokens to draw from; choose 1 or more, or -1 for all")


def _check_group_size(pipeline: Pipeline, place: Place, node: RolloutNode, findings: Findings) -> None:
    for name, other in pipeline.nodes.items():
        if isinstance(other, AdvantageNode) and other.estimator != "reinforce_plus_plus" and node.n < 2:
            message = (
                f"`{name}` compares the responses to a prompt ({other.estimator}), and there is only {node.n}; "
                "set `n: 2` or more"
            )
            findings.error((*place, "n"), message)


def _check_advantage(pipeline: Pipeline, place: Place, node: AdvantageNode, findings: Findings) -> None:
    if "normalize_by_std" in node.model_fields_set and node.estimator != "grpo":
        message = f"only grpo asks whether to divide by a group's deviation, and this is {node.estimator}; take it out"
        findings.error((*place, "normalize_by_std"), message)
    sampling = {name: rollout.sampling for name, rollout in rollouts(pipeline).items()}
    if node.overlong_buffer is None or not sampling:
        return
    name = max(sampling, key=lambda each: sampling[each].max_new_tokens)
    if node.overlong_buffer.len > sampling[name].max_new_tokens:
        longest: Place = ("nodes", name, "sampling", "max_new_tokens")
        message = (
            f"{node.overlong_buffer.len} tokens are more than the longest response has "
            f"({dotted(longest)} = {sampling[name].max_new_tokens}); lower it"
        )
        findings.error((*place, "overlong_buffer", "len"), message, depends_on=[longest])


def _check_loss(pipeline: Pipeline, place: Place, node: UpdateNode, findings: Findings) -> None:
    """Options that the form of the loss does not know, and those without which it is not what its paper means."""
    loss, place = node.loss, (*place, "loss")
    foreign = {"dual_clip": loss.policy != "ppo_clip", "drift_coef": loss.policy != "cpgd"}
    foreign |= dict.fromkeys(("clip_ratio", "clip_ratio_high"), loss.policy == "reinforce")
    for option in loss.model_fields_set:
        if foreign.get(option) and getattr(loss, option) is not None:
            findings.error((*place, option), f"`policy: {loss.policy}` has no use for it; take it out")
    if loss.policy == "gspo" and "clip_ratio" not in loss.model_fields_set:
        message = (
            f"gspo clips the mean ratio of whole responses, which hardly ever moves by {loss.clip_ratio}; set "
            "`clip_ratio: 3.0e-4` and `clip_ratio_high: 4.0e-4`, as in the paper"
        )
        findings.warning((*place, "policy"), message)
    several = node.optimizer_steps(pipeline.data.prompts_per_step) > 1
    weighted = node.rollout_correction is not None and node.rollout_correction.rollout_is is not None
    if loss.policy == "reinforce" and several and not weighted:
        message = (
            "from the second optimizer step on, the samples are an older policy's, and reinforce has no ratio to "
            "account for that; take out `mini_batch` and `epochs`, choose cispo, or set `rollout_correction`"
        )
        findings.warning((*place, "policy"), message)
