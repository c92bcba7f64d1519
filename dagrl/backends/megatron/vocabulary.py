"""Rows of an embedding on the devices: the vocabulary, padded so that ranks divide it evenly."""

from __future__ import annotations

import math

_LARGE_VOCABULARY = 16384


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Rows of a Megatron model's embedding.

    Layouts of up to 8 ranks have the same size, so that a checkpoint of one loads into another. Large vocabularies are
    padded to sizes that suit matrix units on every rank.
    """
    unit = 1024 if vocab_size >= _LARGE_VOCABULARY else 8
    multiple = math.lcm(unit, tensor_parallel_size)
    return math.ceil(vocab_size / multiple) * multiple
