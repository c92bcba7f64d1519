"""Rules within a node, or between a node and the rest of the file, that are not about columns or engines."""

from __future__ import annotations

from pathlib import Path

from dagrl.spec.custom import check_arguments, fields_of, load_function
from dagrl.spec.errors import Place, suggest
from dagrl.spec.positions import Findings
from dagrl.spec.schema import AdvantageNode, CustomNode, Pipeline, RewardNode, RolloutNode, SamplingSpec

OWN_REWARDS = ("math", "exact")
"""Rewards that come with dagrl."""


def check_nodes(pipeline: Pipeline, folder: Path, findings: Findings) -> None:
    """Report what is wrong with rewards, own ops and sampling; `folder` holds the user's own modules."""
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
            _check_group_size(pipeline, place, node, findings)


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
        if isinstance(other, AdvantageNode) and other.estimator == "grpo" and node.n < 2:
            message = (
                f"`{name}` compares the responses to a prompt (grpo), and there is only {node.n}; set `n: 2` or more"
            )
            findings.error((*place, "n"), message)
