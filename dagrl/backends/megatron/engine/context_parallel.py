"""Which tokens of a pack each context-parallel rank holds.

Megatron and Transformer Engine cut every (padded) sequence of a pack into 2 * size equal chunks; rank r holds chunk r
and chunk 2 * size - 1 - r. Attention is causal, so an early chunk with a late one makes the same work for every rank.
"""

from __future__ import annotations

import numpy as np


def zigzag_index(lengths: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Places in the pack of the tokens that `rank` of `size` ranks holds, in the order in which it holds them.

    `lengths` are those of the pack's sequences, padding included, int [sequences]; each a multiple of 2 * size, or
    anything where `size` is 1. Returns int64 [tokens / size]. The same places as Transformer Engine's
    ``thd_get_partitioned_indices``.
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
    return first.repeat(counts) + np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
