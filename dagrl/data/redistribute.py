"""Which rows go to which data-parallel rank, and where each of them lies.

Pure functions on row ids and lengths: the driver plans with metadata alone, workers then fetch what they were given.
A consumer's layout never depends on the producer's; any two fit together by row ids.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def assign(tokens: np.ndarray, groups: np.ndarray | None, ranks: int) -> list[np.ndarray]:
    """Share rows out to `ranks` data-parallel ranks, balanced by tokens.

    `tokens` [rows] is the length of each row; `groups` [rows] its group id, where the rows of a group have to stay
    together. Returns the positions of each rank's rows, int64, ascending; some are empty where there are fewer items
    (rows, or groups) than ranks. The same arguments give the same answer.

    Longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", 1969): the longest item that
    is left goes to the emptiest rank. No rank then holds more than the mean and the longest item together.
    """
    item_of_row, items = _items(len(tokens), groups)
    load_of_item = np.zeros(items, dtype=np.int64)
    np.add.at(load_of_item, item_of_row, tokens.astype(np.int64))
    rank_of_item = np.zeros(items, dtype=np.int64)
    # Items count after tokens, so that items of no tokens are spread too.
    ranks_by_load = [(0, 0, rank) for rank in range(ranks)]
    for item in np.argsort(-load_of_item, kind="stable"):
        load, count, rank = ranks_by_load[0]
        rank_of_item[item] = rank
        heapq.heapreplace(ranks_by_load, (load + int(load_of_item[item]), count + 1, rank))
    rank_of_row = rank_of_item[item_of_row]
    return [np.flatnonzero(rank_of_row == rank) for rank in range(ranks)]


def locate(blocks: Sequence[np.ndarray], rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Where wanted rows lie: (index of a block, positions in it, int64, ascending), for the blocks that are needed.

    `blocks` are the row ids that each producer's block holds, `rows` the wanted ids, each once. Every row comes from
    one block: the first that holds it. Raises ValueError for a row that no block holds.
    """
    wanted = np.sort(rows)
    assert (np.diff(wanted) > 0).all(), "locate: a row is wanted twice"
    found = np.zeros(len(wanted), dtype=bool)
    pieces = []
    for index, block in enumerate(blocks):
        positions = np.flatnonzero(np.isin(block, wanted[~found]))
        if positions.size:
            here = np.isin(wanted, block[positions])
            assert here.sum() == positions.size, f"locate: block {index} holds a row twice"
            pieces.append((index, positions))
            found |= here
    if not found.all():
        missing = wanted[~found]
        raise ValueError(f"row {missing[0]} is in none of the {len(blocks)} blocks ({len(missing)} rows are missing)")
    return pieces


def _items(rows: int, groups: np.ndarray | None) -> tuple[np.ndarray, int]:
    """What is moved as one: the item of each row, and how many there are."""
    if groups is None:
        return np.arange(rows), rows
    names, item_of_row = np.unique(groups, return_inverse=True)
    return item_of_row, len(names)
