"""``reward_model``: scores each response with a model with a reward head."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from dagrl.backends.base import Conversation
from dagrl.config.schema import RewardModelNode
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.response import response_text
from dagrl.ops.reward import reward_stats


def reward_model(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield the scores of each shard: from its tokens, or from its text if the model has its own tokenizer."""
    node = context.declared(RewardModelNode)
    for part in parts:
        batch, stats = part.batch, {}
        if context.pipeline.engines[node.engine].reads_messages:
            conversations = [_conversation(batch, row, context) for row in range(len(batch))]
            scored = context.scorer.scores(conversations, tokens_per_micro_batch=node.tokens_per_micro_batch)
            scores = Column(scored.values.astype(np.float32))
            stats = {"reward/cut_fraction": Stat.of(scored.cut)}
        else:
            scores = context.trainer.values(batch, tokens_per_micro_batch=node.tokens_per_micro_batch)
        yield Output((part.index,), batch.rows, {"reward": scores}, reward_stats(node, scores.values) | stats)


def _conversation(batch: Batch, row: int, context: Context) -> Conversation:
    response = {"role": "assistant", "content": response_text(batch["response_tokens"][row], context)}
    return [*json.loads(batch["messages"].string(row)), response]
