"""``mix``: replaces the last responses of each group by expert responses from the data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagrl.config.schema import MixNode
from dagrl.data.batch import Batch, Column
from dagrl.ops.base import Context, OpInput, Output


def mix(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    node = context.declared(MixNode)
    for part in parts:
        columns = _mixed(part.batch, node.per_prompt)
        yield Output((part.index,), part.batch.rows, columns, uncounted=("response_tokens",))


def _mixed(batch: Batch, per_prompt: int) -> dict[str, Column]:
    _, first, group, sizes = np.unique(
        batch["group_id"].values, return_index=True, return_inverse=True, return_counts=True
    )
    place = np.arange(len(batch)) - first[group]
    # Index among the group's expert rows; the data set's responses are in the group's first rows.
    expert = place - (sizes[group] - per_prompt)
    is_expert = expert >= 0
    given = batch["demonstration"].take(np.where(is_expert, first[group] + expert, 0))
    count = len(given.values)
    ours = {
        "response_tokens": given,
        "response_mask": Column(np.ones(count, dtype=np.float32), given.offsets),
        # Placeholders: these tokens are not sampled, and losses skip rows with is_expert.
        "rollout_logprob": Column(np.zeros(count, dtype=np.float32), given.offsets),
        "finish_reason": Column.text(["stop"] * len(batch)),
    }
    chosen = np.arange(len(batch)) + np.where(is_expert, len(batch), 0)
    columns = {name: Column.concat([batch[name], column]).take(chosen) for name, column in ours.items()}
    return columns | {"is_expert": Column(is_expert.astype(np.float32))}
