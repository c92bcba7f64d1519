"""``logprob``: log-probs of the sampled tokens under an engine's current, initial or averaged weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dagrl.config.schema import LogprobNode
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.selected_rows import for_every_row, selected_rows


def logprob(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield the log-probs of each shard; logits are divided by the sampling temperature."""
    engine = context.trainer
    node = context.declared(LogprobNode)
    with context.scored_weights():
        for part in parts:
            # A rank without rows still takes part, because others may have some.
            rows = selected_rows(node, part.batch, context)
            column = engine.logprobs(
                context.with_temperatures(part.batch if rows is None else part.batch.take(rows)),
                temperature=context.temperature,
                tokens_per_micro_batch=node.tokens_per_micro_batch,
            )
            columns = for_every_row({"logprob": column}, rows, part.batch)
            yield Output((part.index,), part.batch.rows, columns)
