"""Updates: redundant old log-probs, and training on mini-batches as soon as shards are ready."""

from __future__ import annotations

from collections.abc import Mapping

from dagrl.config.schema import LogprobNode, Pipeline, Scope, UpdateNode
from dagrl.graph.dag import Graph, GraphNode


def redundant_nodes(pipeline: Pipeline, nodes: Mapping[str, GraphNode]) -> dict[str, str]:
    """Nodes that do not change the result -> the reason. The plan skips them.

    Old log-probs are redundant if only updates of the same engine read them, with one optimizer step for each batch:
    they are computed under the weights at the update's start, independent of the samples' age, so the update's
    log-probs are the same, at the same temperature and after the same prompts, and the ratio is 1. (How far older
    samples are from these weights is for `rollout_correction`.) With dropout in updates, their log-probs differ.
    """
    redundant = {}
    for name, node in nodes.items():
        if not isinstance(node.spec, LogprobNode):
            continue
        readers = [
            (other, column)
            for other in nodes.values()
            for column, wire in other.inputs.items()
            # The sink only shows log-probs that another node needs.
            if wire.node == name and other.spec is not None
        ]
        if readers and all(
            column == "old_logprob"
            and isinstance(update := reader.spec, UpdateNode)
            and update.engine == node.spec.engine
            and reader.inputs["prompt_tokens"].column == node.inputs["prompt_tokens"].column
            and not updates_with_dropout(pipeline, update)
            and _takes_one_step(pipeline, update)
            for reader, column in readers
        ):
            updates = " and ".join(f"`{reader.name}`" for reader, _ in readers)
            redundant[name] = f"{updates} takes one optimizer step for each batch, so the ratio is 1"
    return redundant


def updates_with_dropout(pipeline: Pipeline, update: UpdateNode) -> bool:
    """Whether dropout makes an update's log-probs differ from the ones before it."""
    engine = pipeline.engines.get(update.engine)
    return engine is not None and bool(engine.adapter_dropout)


def _takes_one_step(pipeline: Pipeline, update: UpdateNode) -> bool:
    """Whether an update trains once on a step's batch, and needs no old log-probs before its first micro-batch."""
    correction = update.rollout_correction
    normalizes = correction is not None and correction.rollout_is_batch_normalize
    return update.optimizer_steps(pipeline.data.prompts_per_step) == 1 and not normalizes


def update_pieces(pipeline: Pipeline, node: UpdateNode) -> tuple[tuple[int, ...], ...]:
    """Shards of each mini-batch of an update, in the order of training; empty if it does not stream.

    The pipeline has passed its checks, so mini-batches end where shards do.
    """
    count = node.optimizer_steps(pipeline.data.prompts_per_step)
    if not pipeline.schedule.stream_update or count == 1:
        return ()
    size = pipeline.schedule.shards_per_step // count
    return tuple(tuple(range(size * piece, size * (piece + 1))) for piece in range(count))


def hindrance(pipeline: Pipeline, name: str, node: UpdateNode, graph: Graph | None) -> str:
    """The reason why the update `name` cannot train on its mini-batches one by one, and the remedy; empty if it can.

    `graph` is None if it has problems; then only numbers are checked.
    """
    prompts, shards = pipeline.data.prompts_per_step, pipeline.schedule.shards_per_step
    count = node.optimizer_steps(prompts)
    if node.epochs > 1:
        return f"`{name}` takes {node.epochs} epochs, and the second needs the whole step; set `epochs: 1`"
    if count > 1 and (shards % count or prompts % shards):
        return (
            f"`{name}` takes {count} mini-batches from {shards} shards of {prompts} prompts, which do not end "
            f"together; set schedule.shards_per_step to a multiple of {count} that divides {prompts}, such as {count}"
        )
    if graph is None:
        return ""
    graph = graph.working
    if graph.filter:
        return f"the groups that `{name}` trains on are known when `{graph.filter}` ends; remove one of the two"
    for other in graph.ancestors(name):
        before = graph.nodes[other]
        if before.spec is None:
            continue  # The data set is complete at once.
        if before.contract.scope is Scope.BATCH:
            return f"`{other}` needs the whole step before `{name}` can begin; choose one that works on groups or rows"
        if isinstance(before.spec, LogprobNode) and _moves_with(pipeline, before.spec.engine or "") == node.engine:
            read_as = {
                column
                for reader in graph.nodes.values()
                for column, wire in reader.inputs.items()
                if wire.node == other and reader.spec is not None
            }
            remedy = "let an engine or frozen copy that does not move compute them, or drop `stream_update`"
            if read_as == {"old_logprob"}:
                remedy = (
                    f"take those of the rollout, `read: {{old_logprob: rollout_logprob}}` in `{name}`, "
                    f"without `{other}`"
                )
            fact = "log-probs of the whole step with the weights from before its first mini-batch"
            return f"`{other}` computes {fact}; {remedy}"
    return ""


def _moves_with(pipeline: Pipeline, engine: str) -> str:
    """The engine whose updates change the weights of `engine`: itself, or the engine whose average it is."""
    spec = pipeline.engines.get(engine)
    return (spec.frozen_copy_of if spec and spec.moving_average is not None else None) or engine
