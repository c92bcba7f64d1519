"""Rules within a node, or between a node and the rest of the file, that are not about columns, engines or formulas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dagrl.backends.families.sizes import ModelSizes
from dagrl.config.errors import Place, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.reward_names import BUILT_IN_REWARDS
from dagrl.config.schema import (
    CustomNode,
    JudgeNode,
    LogprobNode,
    Pipeline,
    RewardNode,
    RolloutNode,
    SamplingSpec,
    TokenizerSpec,
    TrainingNode,
)
from dagrl.graph.plugins.custom import check_arguments_at, contract_at, reward_fields_at, reward_traits_at
from dagrl.graph.plugins.isolation import ask
from dagrl.models.hf_config import token_ids

_LEAST_TEMPERATURE = 1e-3
"""Logits of some hundreds, divided by it, are far from the end of float32."""


def check_nodes(pipeline: Pipeline, folder: Path, sizes: Mapping[str, ModelSizes], findings: Findings) -> None:
    """Report what is wrong with rewards, own ops, references and sampling; `folder` holds the user's own modules,
    `sizes` are those of the engines' models.
    """
    for name, node in pipeline.nodes.items():
        place: Place = ("nodes", name)
        if isinstance(node, RewardNode):
            _check_reward(place, node, folder, findings)
        elif isinstance(node, CustomNode):
            _check_op(place, node, folder, findings)
        elif isinstance(node, LogprobNode):
            _check_reference(pipeline, name, node, findings)
        elif isinstance(node, JudgeNode):
            _check_sampling((*place, "sampling"), node.sampling, None, findings)
        elif isinstance(node, RolloutNode):
            vocabulary = _vocabulary(pipeline, node.engine, sizes)
            _check_sampling((*place, "sampling"), node.sampling, vocabulary, findings)
            if node.val_sampling is not None:
                _check_sampling((*place, "val_sampling"), node.val_sampling, vocabulary, findings)


def _check_reward(place: Place, node: RewardNode, folder: Path, findings: Findings) -> None:
    own = node.fn not in BUILT_IN_REWARDS
    if own and ":" not in node.fn:
        message = f"there is no reward `{node.fn}` (your own is written `module:function`); "
        findings.error((*place, "fn"), message + suggest(node.fn, BUILT_IN_REWARDS))
        return
    name = node.fn if own else BUILT_IN_REWARDS[node.fn]
    try:
        traits = ask(name, reward_traits_at, name, folder=folder)
    except ValueError as error:
        findings.error((*place, "fn"), str(error))
        return
    try:
        ask(name, reward_fields_at, name, node.args, folder=folder)
    except ValueError as error:
        findings.error((*place, "args") if node.args else (*place, "fn"), str(error))
    if node.concurrency is not None and traits.batched:
        message = f"`{node.fn}` is batched: it is called once, with all samples of a shard"
        findings.error((*place, "concurrency"), f"{message}; leave concurrency out, or the mark `batched`")


def _check_reference(pipeline: Pipeline, name: str, node: LogprobNode, findings: Findings) -> None:
    """Warn of a reference that moves with the policy."""
    trained = [other.engine for other in pipeline.nodes.values() if isinstance(other, TrainingNode)]
    if node.written_as("logprob") == "ref_logprob" and node.engine in trained:
        message = (
            f"`{node.engine}` is trained, so that the divergence is from the policy at the beginning of each step; for "
            f"one from the start weights, name an engine with `frozen_copy_of: {node.engine}`"
        )
        findings.warning(("nodes", name, "engine"), message, depends_on=[("nodes",), ("engines",)])


def _check_op(place: Place, node: CustomNode, folder: Path, findings: Findings) -> None:
    try:
        ask(node.op, contract_at, node.op, folder=folder)
    except ValueError:
        return  # `infer_graph` says what is wrong.
    try:
        ask(node.op, check_arguments_at, node.op, node.args, folder=folder)
    except ValueError as error:
        findings.error((*place, "args") if node.args else (*place, "op"), str(error))


def _vocabulary(pipeline: Pipeline, engine: str, sizes: Mapping[str, ModelSizes]) -> int | None:
    """Tokens that the engine's model knows; None where only the engine can say."""
    if engine not in sizes:
        return None
    if size := sizes[engine].vocabulary:
        return size.value
    tokenizer = pipeline.model_of(engine).tokenizer
    return len(token_ids(tokenizer)) if isinstance(tokenizer, TokenizerSpec) else None


def _check_sampling(place: Place, sampling: SamplingSpec, vocabulary: int | None, findings: Findings) -> None:
    if 0 < sampling.temperature < _LEAST_TEMPERATURE:
        message = f"logits divided by {sampling.temperature:g} overflow; choose {_LEAST_TEMPERATURE} or more, or 0"
        findings.error((*place, "temperature"), f"{message} for the likeliest token")
    for index, token in enumerate(sampling.stop_token_ids):
        if vocabulary is not None and token >= vocabulary:
            message = f"the model has {vocabulary} tokens, from 0 on, so that {token} is none; take it out"
            findings.error((*place, "stop_token_ids", index), message, depends_on=[("model",), ("engines",)])
    if sampling.top_k == 0 or sampling.top_k < -1:
        findings.error((*place, "top_k"), f"{sampling.top_k} tokens to draw from; choose 1 or more, or -1 for all")
