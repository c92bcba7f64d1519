"""Updates that begin before their step's last response is there: mini-batch by mini-batch, each from its own shards."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.config.schema import LogprobNode, Pipeline, UpdateNode
from dagrl.graph.dag import PROMPTS_NODE, Graph
from dagrl.graph.op_contracts import Scope


def update_pieces(pipeline: Pipeline, node: UpdateNode) -> tuple[tuple[int, ...], ...]:
    """Shards of each mini-batch of an update, in the order in which they are trained on; none where it does not stream.

    The pipeline has passed its checks, so that the mini-batches end where shards do.
    """
    count = node.optimizer_steps(pipeline.data.prompts_per_step)
    if not pipeline.schedule.stream_update or count == 1:
        return ()
    each = pipeline.schedule.shards_per_step // count
    return tuple(tuple(range(each * piece, each * (piece + 1))) for piece in range(count))


def hindrances(pipeline: Pipeline, name: str, node: UpdateNode, graph: Graph | None) -> Iterator[str]:
    """Why the update `name` cannot take its mini-batches one by one, each with what to do about it.

    `graph` is None where the columns are not sorted out yet: then only numbers are looked at.
    """
    prompts, shards = pipeline.data.prompts_per_step, pipeline.schedule.shards_per_step
    if node.epochs > 1:
        yield f"`{name}` takes {node.epochs} epochs, and the second needs the whole step; set `epochs: 1`"
        return
    count = node.optimizer_steps(prompts)
    if count > 1 and (shards % count or prompts % shards):
        yield (
            f"`{name}` takes {count} mini-batches from {shards} shards of {prompts} prompts, which do not end "
            f"together; set schedule.shards_per_step to a multiple of {count} that divides {prompts}, such as {count}"
        )
    if graph is None:
        return
    graph = graph.working
    if graph.filter:
        yield f"which groups `{name}` trains on is known when `{graph.filter}` is through; take one of the two out"
        return
    for other in graph.ancestors(name) - {PROMPTS_NODE}:
        before = graph.nodes[other]
        if before.contract.scope is Scope.BATCH:
            yield f"`{other}` needs the whole step before `{name}` can begin; choose one that works on groups or rows"
        elif isinstance(before.spec, LogprobNode) and before.spec.engine == node.engine:
            yield (
                f"`{other}` computes log-probs of the whole step with the weights from before its first mini-batch; "
                f"take those of the rollout, `read: {{old_logprob: rollout_logprob}}` in `{name}`, without `{other}`"
            )
