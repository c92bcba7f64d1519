"""Selects and joins rows: rows of a trajectory, and rows that the policy sampled.

The rows of a trajectory are consecutive in every batch that holds whole groups.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dagrl.config.schema.data import DataSpec
from dagrl.data.batch import Batch, Column
from dagrl.data.order.sampler import GroupOutcomes
from dagrl.environments.failures import LOST
from dagrl.ops.base import Context


def first_rows(batch: Batch, context: Context) -> Batch:
    """The first row of each trajectory, which represents it: its reward is the trajectory's."""
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


def with_lengths(joined: Batch, batch: Batch, context: Context) -> Batch:
    """Joined rows with the lengths of their responses in tokens, int64 [trajectories].

    ``length`` counts all rows, ``longest_row`` the longest one, which ``max_new_tokens`` bounds. Untrained rows of
    several do not count: unused ones have a token too.
    """
    mask, rows = batch["response_mask"], context.sequences
    lengths = mask.lengths
    if rows > 1:
        trained = np.bincount(np.repeat(np.arange(len(mask)), lengths), mask.values > 0, minlength=len(mask)) > 0
        lengths = np.where(trained, lengths, 0)
    by_trajectory = lengths.reshape(-1, rows)
    columns = {"length": Column(by_trajectory.sum(axis=1)), "longest_row": Column(by_trajectory.max(axis=1))}
    return joined.with_columns(columns)


def split_rows(columns: Mapping[str, Column], batch: Batch) -> dict[str, Column]:
    """Expand token columns of joined rows to the rows of `batch`, ragged as its ``response_mask``."""
    return {name: Column(column.values, batch["response_mask"].offsets) for name, column in columns.items()}


def own_rows(batch: Batch) -> Batch:
    """Rows that the policy sampled and whose agent did not fail."""
    own = _is_own(batch)
    return batch if own.all() else batch.take(np.flatnonzero(own))


def was_lost(batch: Batch) -> np.ndarray:
    """Bool [rows]: whether a failure that says nothing of the policy has excluded the sample."""
    if "excluded" not in batch:
        return np.zeros(len(batch), dtype=bool)
    lost = np.isin(np.array(batch["finish_reason"].strings()), LOST)
    return lost & (batch["excluded"].values > 0)


def is_fresh(batch: Batch) -> np.ndarray:
    """Bool [rows]: whether this step sampled the row, not returned by a buffer."""
    return batch["is_replayed"].values == 0 if "is_replayed" in batch else np.ones(len(batch), dtype=bool)


def for_all_rows(columns: Mapping[str, Column], own: Batch, batch: Batch) -> dict[str, Column]:
    """Expand columns of the `own` rows to all rows of `batch`, ragged as ``response_mask``, with 0 for others."""
    if len(own) == len(batch):
        return dict(columns)
    return spread_rows(columns, _is_own(batch), batch["response_mask"].offsets, missing=0)


def spread_rows(
    columns: Mapping[str, Column], selected: np.ndarray, offsets: np.ndarray | None, *, missing: float | None = None
) -> dict[str, Column]:
    """Token columns of the `selected` rows, bool [rows], for all rows, whose tokens are at `offsets`.

    Other rows have the value `missing`: by default NaN, or -1 in columns of integers.
    """
    assert offsets is not None, "tokens are ragged"
    at = np.repeat(selected, np.diff(offsets))
    spread = {}
    for name, column in columns.items():
        fill = missing if missing is not None else np.nan if column.values.dtype.kind == "f" else -1
        values = np.full((len(at), *column.values.shape[1:]), fill, dtype=column.values.dtype)
        values[at] = column.values
        spread[name] = Column(values, offsets)
    return spread


def _is_own(batch: Batch) -> np.ndarray:
    """Bool [rows]."""
    own = np.ones(len(batch), dtype=bool)
    for name in ("is_expert", "excluded"):
        if name in batch:
            own &= batch[name].values == 0
    return own


def group_outcomes(batch: Batch, data: DataSpec) -> GroupOutcomes | None:
    """The means over each group of a batch; None if the order does not use them."""
    if not data.order_learns:
        return None
    groups, place, counts = np.unique(batch["group_id"].values, return_inverse=True, return_counts=True)

    def means(values: np.ndarray) -> np.ndarray:
        return np.bincount(place, weights=values, minlength=len(groups)) / counts

    rewards = passes = advantages = np.full(len(groups), np.nan)
    if "reward" in batch:
        values = batch["reward"].values.astype(np.float64)
        rewards, passes = means(values), means((values >= data.val_pass_reward).astype(np.float64))
    if "advantage" in batch:
        of_tokens = [np.abs(batch["advantage"][row]) for row in range(len(batch))]
        advantages = means(np.array([float(sizes.mean()) if len(sizes) else 0.0 for sizes in of_tokens]))
    return GroupOutcomes(groups, rewards, passes, advantages)
