"""Separates an expert's rows from those sampled by the policy; see the op ``mix``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dagrl.data.batch import Batch, Column


def own_rows(batch: Batch) -> Batch:
    """Rows sampled by the policy."""
    if "is_expert" not in batch:
        return batch
    return batch.take(np.flatnonzero(batch["is_expert"].values == 0))


def for_all_rows(columns: Mapping[str, Column], own: Batch, batch: Batch) -> dict[str, Column]:
    """Expand columns of the `own` rows to all rows of `batch`, ragged as ``response_mask``, with 0 for an expert's."""
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
