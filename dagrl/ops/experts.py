"""Separates rows that count in baselines from an expert's, of the op ``mix``, and those whose agent failed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dagrl.data.batch import Batch, Column


def own_rows(batch: Batch) -> Batch:
    """Rows sampled by the policy, whose agent did not fail."""
    own = _is_own(batch)
    return batch if own.all() else batch.take(np.flatnonzero(own))


def for_all_rows(columns: Mapping[str, Column], own: Batch, batch: Batch) -> dict[str, Column]:
    """Expand columns of the `own` rows to all rows of `batch`, ragged as ``response_mask``, with 0 for others."""
    if len(own) == len(batch):
        return dict(columns)
    mask = batch["response_mask"]
    is_own = np.repeat(_is_own(batch), mask.lengths)
    spread = {}
    for name, column in columns.items():
        values = np.zeros(len(mask.values), dtype=column.values.dtype)
        values[is_own] = column.values
        spread[name] = Column(values, mask.offsets)
    return spread


def _is_own(batch: Batch) -> np.ndarray:
    """Bool [rows]."""
    own = np.ones(len(batch), dtype=bool)
    for name in ("is_expert", "excluded"):
        if name in batch:
            own &= batch[name].values == 0
    return own
