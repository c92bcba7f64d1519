"""``reward_model``: scores each response with a model that has a reward head."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from dagrl.backends.base import Conversation
from dagrl.config.schema import RewardModelNode
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.response_text import response_text


def reward_model(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield the scores of each shard: from its tokens, or from its text if the model has its own tokenizer."""
    node = context.node
    assert isinstance(node, RewardModelNode)
    of_text = context.pipeline.engines[node.engine].reads_messages
    column = node.written_as("reward")
    for part in parts:
        scores, stats = (_of_text if of_text else _of_tokens)(part.batch, node, context)
        # `samples` reports the mean of `reward`, which other nodes may change.
        told = {} if column == "reward" else {f"reward/{column}": Stat.of(scores.values)}
        yield Output((part.index,), part.batch.rows, {"reward": scores}, told | stats)


def _of_tokens(batch: Batch, node: RewardModelNode, context: Context) -> tuple[Column, dict[str, Stat]]:
    engine = context.trainer
    return engine.values(batch, tokens_per_micro_batch=node.tokens_per_micro_batch), {}


def _of_text(batch: Batch, node: RewardModelNode, context: Context) -> tuple[Column, dict[str, Stat]]:
    engine = context.scorer
    conversations = [_conversation(batch, row, context) for row in range(len(batch))]
    scores = engine.scores(conversations, tokens_per_micro_batch=node.tokens_per_micro_batch)
    return Column(scores.values.astype(np.float32)), {"reward/cut_fraction": Stat.of(scores.cut)}


def _conversation(batch: Batch, row: int, context: Context) -> Conversation:
    """The prompt's messages, followed by the response."""
    said = {"role": "assistant", "content": response_text(batch["response_tokens"][row], context)}
    return [*json.loads(bytes(batch["messages"][row])), said]
