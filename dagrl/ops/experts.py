"""Rows that an expert has written, among those that the policy has sampled: see the op ``mix``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dagrl.data.batch import Batch, Column


def own_rows(batch: Batch) -> Batch:
    """The rows that the policy has sampled: all of them, where nothing was mixed in."""
    if "is_expert" not in batch:
        return batch
    return batch.take(np.flatnonzero(batch["is_expert"].values == 0))


def for_all_rows(columns: Mapping[str, Column], own: Batch, batch: Batch) -> dict[str, Column]:
    """Columns of the `own` rows as columns of all of `batch`, ragged as ``response_mask``: 0 for the others."""
    if len(own) == len(batch):
        return dict(columns)
    mask = batch["response_mask"]
    is_own = np.repeat(batch["is_expert"].values == 0, mask.lengths)
    spread = {}
    for name, column in columns.items():
        values = np.zeros(len(mask.values), dtype=column.values.dtype)
        values[is_own] = column.values
        spread[name] = Column(values, mask.offsets)
    return spread
