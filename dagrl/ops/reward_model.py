"""``reward_model``: scores each response with a model with a reward head."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from dagrl.backends.base import Conversation
from dagrl.config.schema import RewardModelNode
from dagrl.data.batch import Batch
from dagrl.data.stats import Stat
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.response import response_text
from dagrl.ops.reward import reward_stats
from dagrl.ops.selected_rows import selected_rows, spread_values


def reward_model(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield the scores of each shard: from its tokens, or from its text if the model has its own tokenizer."""
    node = context.declared(RewardModelNode)
    for part in parts:
        rows, stats = selected_rows(node, part.batch, context), {}
        # A rank without rows still takes part, because other ranks may have rows.
        batch = part.batch if rows is None else part.batch.take(rows)
        if context.pipeline.engines[node.engine].reads_messages:
            conversations = [_conversation(batch, row, context) for row in range(len(batch))]
            scored = context.scorer.scores(conversations, tokens_per_micro_batch=node.tokens_per_micro_batch)
            scores = scored.values
            stats = {"reward/cut_fraction": Stat.of(scored.cut)}
        else:
            scores = context.trainer.values(batch, tokens_per_micro_batch=node.tokens_per_micro_batch).values
        columns = {"reward": spread_values(scores, rows, len(part.batch))}
        yield Output((part.index,), part.batch.rows, columns, reward_stats(node, scores) | stats)


def _conversation(batch: Batch, row: int, context: Context) -> Conversation:
    response = {"role": "assistant", "content": response_text(batch["response_tokens"][row], context)}
    return [*json.loads(batch["messages"].string(row)), response]
