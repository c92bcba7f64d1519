"""Seconds of nodes that run on CPUs: prompts, rewards, advantages, samples, and users' own."""

from __future__ import annotations

from dagrl.config.schema import AdvantageNode, JudgeNode, LogprobNode, NodeBase, Pipeline, RewardNode
from dagrl.config.schema.rounds import prompts_per_round
from dagrl.graph.dag import PROMPTS_NODE, SAMPLES_NODE
from dagrl.planner.cost.lengths import MEAN_RESPONSE

_NODE_S = 5e-3
_ROW_S = 50e-6
"""A row is unpacked, read and packed: an order of magnitude, as the others, on one core of a server."""
_MATH_ROW_S = 1.2e-3
"""A short answer compared by math-verify: measured on one core."""
_CODE_ROW_S = 0.3
"""A program runs some tests in processes of 60 ms, measured on one core, while other programs run too."""
_REMOTE_TOKEN_S = 0.015
"""A token of a judge's reply, at an unknown server."""
_REMOTE_ROW_S = 0.2
"""Log-probs of a row, at an unknown server."""
_ADVANTAGE_ROW_S = 20e-6
_PROMPT_S = 150e-6
"""To read and tokenize a prompt."""
_SAMPLE_S = 0.5e-3
"""To decode and write a row."""


def node_seconds(node: NodeBase | None, name: str, rows: float, pipeline: Pipeline) -> float:
    """Return the seconds of a node on `rows` rows; nodes without an entry in the file are known by `name`."""
    if name == PROMPTS_NODE:
        return _NODE_S + prompts_per_round(pipeline) * _PROMPT_S
    if name == SAMPLES_NODE:
        return _NODE_S + min(rows, pipeline.run.samples_per_step) * _SAMPLE_S
    row_s = _ROW_S
    if isinstance(node, RewardNode) and node.expected_s is not None:
        row_s = _ROW_S + node.expected_s / (node.concurrency or 1)
    elif isinstance(node, RewardNode):
        seconds = {"math": _MATH_ROW_S, "code": _CODE_ROW_S}
        shares = {name: spec.weight * pipeline.ns[name] for name, spec in pipeline.data.sources.items()}
        functions = {name: node.function_of(name) for name in shares}
        taken = {name: seconds.get(function.fn, _ROW_S) if function else 0.0 for name, function in functions.items()}
        row_s = sum(shares[name] * taken[name] for name in shares) / sum(shares.values())
    elif isinstance(node, JudgeNode):
        answer = node.sampling.max_new_tokens * MEAN_RESPONSE * _REMOTE_TOKEN_S
        row_s = (answer if node.expected_s is None else node.expected_s) / node.concurrency
    elif isinstance(node, LogprobNode):
        row_s = _REMOTE_ROW_S / node.concurrency
    elif isinstance(node, AdvantageNode):
        row_s = _ADVANTAGE_ROW_S
    return _NODE_S + rows * row_s
