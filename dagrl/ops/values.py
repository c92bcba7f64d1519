"""``values``: a critic's estimates of the return, for each token of a response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dagrl.config.schema import ValuesNode
from dagrl.data.stats import Stat
from dagrl.ops.base import Context, OpInput, Output


def values(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield the values of each shard under the critic's current weights."""
    engine = context.trainer
    node = context.declared(ValuesNode)
    with context.scored_weights():
        for part in parts:
            column = engine.values(part.batch, tokens_per_micro_batch=node.tokens_per_micro_batch)
            stats = {"values/mean": Stat.of(column.values)}
            yield Output((part.index,), part.batch.rows, {"value": column}, stats)
