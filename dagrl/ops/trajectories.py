"""Trajectories with several rows, which are consecutive in every batch that holds whole groups."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dagrl.data.batch import Batch, Column
from dagrl.ops.base import Context


def first_rows(batch: Batch, context: Context) -> Batch:
    """The first row of each trajectory, which stands for it: its reward is the trajectory's."""
    return batch if context.sequences == 1 else batch.take(np.arange(0, len(batch), context.sequences))


def joined_rows(batch: Batch, context: Context) -> Batch:
    """One row for each trajectory: the tokens of all of its rows, and other values of the first."""
    rows = context.sequences
    if rows == 1:
        return batch
    assert len(batch) % rows == 0 and not (batch.rows[::rows] % rows).any(), "trajectories are whole"
    first = first_rows(batch, context)
    joined = {
        name: Column(column.values, column.offsets[::rows])
        for name, column in batch.columns.items()
        if column.offsets is not None and column.values.dtype != np.uint8
    }
    return Batch(first.rows, {**first.columns, **joined})


def split_rows(columns: Mapping[str, Column], batch: Batch) -> dict[str, Column]:
    """Token columns of joined rows as those of `batch`, ragged as its ``response_mask``."""
    return {name: Column(column.values, batch["response_mask"].offsets) for name, column in columns.items()}
