"""Nodes that do not change the result, and why. The plan skips them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagrl.config.schema import LogprobNode, Pipeline, UpdateNode

if TYPE_CHECKING:
    from dagrl.graph.dag import GraphNode


def redundant_nodes(pipeline: Pipeline, nodes: Mapping[str, GraphNode]) -> dict[str, str]:
    """Name of each such node -> the reason.

    Old log-probs are redundant if only an update of the same engine reads them, with one optimizer step
    for each batch: they are those of the weights that the update begins with, however old the samples are, so its own
    log-probs are the same, at the same temperature, and the ratio is 1. (Dropout, which would make them differ, is
    refused by the checks. How far older samples are from these weights is for `rollout_correction`.)
    """
    found = {}
    for name, node in nodes.items():
        spec = node.spec
        if not isinstance(spec, LogprobNode):
            continue
        readers = {
            (other.name, column): other.spec
            for other in nodes.values()
            for column, wire in other.inputs.items()
            if wire.node == name
        }
        if readers and all(
            column == "old_logprob" and _takes_one_step(pipeline, reader, spec.engine)
            for (_, column), reader in readers.items()
        ):
            updates = " and ".join(f"`{reader}`" for reader, _ in readers)
            found[name] = f"{updates} takes one optimizer step for each batch, so the ratio is 1"
    return found


def _takes_one_step(pipeline: Pipeline, reader: object, engine: str) -> bool:
    """Whether a node is an update of the engine that trains once on each step's batch."""
    return (
        isinstance(reader, UpdateNode)
        and reader.engine == engine
        and reader.optimizer_steps(pipeline.data.prompts_per_step) == 1
        and not _knows_before(reader)
    )


def _knows_before(update: UpdateNode) -> bool:
    """Whether it needs the old log-probs of the whole batch before the first micro-batch."""
    return update.rollout_correction is not None and update.rollout_correction.rollout_is_batch_normalize
