"""Rules within a node, or between a node and the rest of the file, that are not about columns, engines or formulas."""

from __future__ import annotations

from pathlib import Path

from dagrl.spec.custom import check_arguments, fields_of, load_function, reward_traits
from dagrl.spec.errors import Place, suggest
from dagrl.spec.positions import Findings
from dagrl.spec.rewards import BUILT_IN_REWARDS
from dagrl.spec.schema import (
    CustomNode,
    JudgeNode,
    Pipeline,
    RewardNode,
    RolloutNode,
    SamplingSpec,
)


def check_nodes(pipeline: Pipeline, folder: Path, findings: Findings) -> None:
    """Report what is wrong with rewards, own ops and sampling; `folder` holds the user's own modules."""
    for name, node in pipeline.nodes.items():
        place: Place = ("nodes", name)
        if isinstance(node, RewardNode):
            _check_reward(place, node, folder, findings)
        elif isinstance(node, CustomNode):
            _check_op(place, node, folder, findings)
        elif isinstance(node, JudgeNode):
            _check_sampling((*place, "sampling"), node.sampling, findings)
        elif isinstance(node, RolloutNode):
            _check_sampling((*place, "sampling"), node.sampling, findings)
            if node.val_sampling is not None:
                _check_sampling((*place, "val_sampling"), node.val_sampling, findings)


def _check_reward(place: Place, node: RewardNode, folder: Path, findings: Findings) -> None:
    own = node.fn not in BUILT_IN_REWARDS
    if own and ":" not in node.fn:
        message = f"there is no reward `{node.fn}` (your own is written `module:function`); "
        findings.error((*place, "fn"), message + suggest(node.fn, BUILT_IN_REWARDS))
        return
    try:
        function = load_function(node.fn if own else BUILT_IN_REWARDS[node.fn], folder)
    except ValueError as error:
        findings.error((*place, "fn"), str(error))
        return
    try:
        fields_of(function, node.args)
    except ValueError as error:
        findings.error((*place, "args") if node.args else (*place, "fn"), str(error))
    if node.concurrency is not None and reward_traits(function).batched:
        message = f"`{node.fn}` is batched: it is called once, with all samples of a shard"
        findings.error((*place, "concurrency"), f"{message}; leave concurrency out, or the mark `batched`")


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
