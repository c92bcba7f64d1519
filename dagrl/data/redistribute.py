"""Assigns rows to data-parallel ranks, and finds the blocks that hold them.

Pure functions of row ids and lengths: the driver plans with metadata only, and workers fetch their rows. Row ids
connect any two layouts.
"""

from __future__ import annotations

import heapq

import numpy as np


def shard_bounds(groups: int, shards: int) -> list[tuple[int, int]]:
    """First group and end of each shard; shards are empty if there are fewer groups than shards."""
    ends = [groups * (shard + 1) // shards for shard in range(shards)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def assign(tokens: np.ndarray, groups: np.ndarray | None, ranks: int) -> list[np.ndarray]:
    """Assign rows to `ranks` data-parallel ranks, balanced by tokens.

    `tokens` [rows] is the length of each row; `groups` [rows] its group id, if the rows of a group have to stay
    together. Returns the positions of each rank's rows, int64, ascending; some are empty if there are fewer items (rows
    or groups) than ranks. The result is deterministic.

    Longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", 1969): the longest remaining
    item goes to the lightest rank, so that no rank exceeds the mean plus the longest item.
    """
    item_of_row, items = _items(len(tokens), groups)
    load_of_item = np.zeros(items, dtype=np.int64)
    np.add.at(load_of_item, item_of_row, tokens.astype(np.int64))
    rank_of_item = np.zeros(items, dtype=np.int64)
    # Item counts break ties, so that items without tokens are spread too.
    ranks_by_load = [(0, 0, rank) for rank in range(ranks)]
    for item in np.argsort(-load_of_item, kind="stable"):
        load, count, rank = ranks_by_load[0]
        rank_of_item[item] = rank
        heapq.heapreplace(ranks_by_load, (load + int(load_of_item[item]), count + 1, rank))
    rank_of_row = rank_of_item[item_of_row]
    return [np.flatnonzero(rank_of_row == rank) for rank in range(ranks)]


class RowIndex:
    """Maps rows to the numbers of the blocks that hold them, in time proportional to the rows looked up.

    The index is as long as the largest row id, because ids are small.
    """

    def __init__(self) -> None:
        self._blocks = 0
        self._block_of_row = np.zeros(0, dtype=np.int32)
        """-1 for rows in no block."""

    def add(self, rows: np.ndarray) -> None:
        """Add a block with the rows of these ids. A row of an earlier block stays there."""
        assert (np.diff(np.sort(rows)) > 0).all(), f"block {self._blocks} has duplicate rows"
        end = int(rows.max(initial=-1)) + 1
        if end > len(self._block_of_row):
            # Doubled, so that appending is amortised.
            more = max(end, 2 * len(self._block_of_row)) - len(self._block_of_row)
            self._block_of_row = np.concatenate([self._block_of_row, np.full(more, -1, dtype=np.int32)])
        self._block_of_row[rows[self._block_of_row[rows] < 0]] = self._blocks
        self._blocks += 1

    def find(self, rows: np.ndarray) -> np.ndarray:
        """The blocks that hold any of these rows, ascending. Raises ValueError for a row in no block."""
        known = rows < len(self._block_of_row)
        blocks = np.full(len(rows), -1, dtype=np.int32)
        blocks[known] = self._block_of_row[rows[known]]
        missing = np.sort(rows[blocks < 0])
        if missing.size:
            raise ValueError(
                f"{len(missing)} rows are in none of the {self._blocks} blocks, row {missing[0]} among them"
            )
        return np.flatnonzero(np.bincount(blocks))


def _items(rows: int, groups: np.ndarray | None) -> tuple[np.ndarray, int]:
    if groups is None:
        return np.arange(rows), rows
    names, item_of_row = np.unique(groups, return_inverse=True)
    return item_of_row, len(names)
