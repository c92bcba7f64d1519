"""Buffers: options that contradict each other, and losses that treat old samples as new ones."""

from __future__ import annotations

from dagrl.config.errors import Place, listed, removal
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import BufferNode, Pipeline, UpdateNode
from dagrl.graph.dag import Graph

_OFF_POLICY = ("opmd", "opmd_kimi", "opmd_pairwise", "dro")
"""Losses for samples of other policies."""


def check_buffers(pipeline: Pipeline, graph: Graph | None, findings: Findings) -> None:
    """Report wrong options of buffers, and updates without a correction; `graph` is None if it has problems."""
    for name, node in pipeline.nodes.items():
        if isinstance(node, BufferNode):
            _check_options(pipeline, name, node, findings)
            if graph is not None:
                _warn_of_uncorrected(pipeline, name, graph, findings)


def _check_options(pipeline: Pipeline, name: str, node: BufferNode, findings: Findings) -> None:
    place: Place = ("nodes", name)
    if not pipeline.rollouts:
        message = removal("a buffer keeps sampled responses, and no node samples", "add a node `{op: rollout, ...}`")
        findings.error(place, message, "buffer-without-rollout")
        return
    if max(pipeline.ns.values()) == 1 and node.keep == "varied":
        message = "a group of one response has no differences, so that none is kept; set `keep: all`"
        findings.error(place, message, "group-too-small")
    if node.capacity is not None and node.capacity < pipeline.rows_per_prompt():
        message = f"a group has {pipeline.rows_per_prompt()} samples, so that none has room; raise it"
        findings.error((*place, "capacity"), message, "capacity-too-small")
    if pipeline.run.recorded is not None and name in pipeline.run.recorded.nodes:
        message = f"records have no room for what `{name}` holds, so it cannot be replayed; name other nodes"
        findings.error(("run", "record"), message, "unrecordable-node")


def _warn_of_uncorrected(pipeline: Pipeline, name: str, graph: Graph, findings: Findings) -> None:
    wrong = [
        update
        for update, node in pipeline.nodes.items()
        if isinstance(node, UpdateNode)
        and name in graph.ancestors(update)
        and node.rollout_correction is None
        and not node.takes_rollout_for_old
        and node.loss.policy not in _OFF_POLICY
        and ":" not in node.loss.policy
    ]
    if wrong:
        remedy = "set `rollout_correction: {rollout_is: token}`, or `read: {old_logprob: rollout_logprob}`"
        message = f"{listed(wrong)} takes samples of older weights for its own; {remedy}"
        findings.warning(("nodes", wrong[0]), message, "uncorrected-replay", depends_on=[("nodes", name)])
