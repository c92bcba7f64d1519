"""Assigns the tokens of a pack to context-parallel ranks.

Megatron and Transformer Engine divide every (padded) sequence of a pack into 2 * size equal chunks; rank r holds chunks
r and 2 * size - 1 - r. With causal attention this gives all ranks the same work.
"""

from __future__ import annotations

import numpy as np


def zigzag_index(lengths: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Positions in the pack of the tokens of `rank`, in the order in which it holds them.

    `lengths` of the pack's sequences include padding, int [sequences]; each is a multiple of 2 * size, unless `size` is
    1. Returns int64 [tokens / size], like Transformer Engine's ``thd_get_partitioned_indices``.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if size == 1:
        return np.arange(lengths.sum())
    assert 0 <= rank < size, f"rank {rank} of {size}"
    assert not (lengths % (2 * size)).any(), f"sequences of {lengths} tokens do not split into {2 * size} equal chunks"
    chunk = lengths // (2 * size)
    start = lengths.cumsum() - lengths
    first = np.stack([start + rank * chunk, start + (2 * size - 1 - rank) * chunk], axis=1).ravel()
    counts = chunk.repeat(2)
    return first.repeat(counts) + counting(counts)


def counting(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ... for each length, one after the other: [2, 3] gives [0, 1, 0, 1, 2]."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
