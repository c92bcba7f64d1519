"""Digests of weights, computed on their device: equal digests mean equal bits."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dagrl.weight_sync.manifest import Bucket
from dagrl.weight_sync.protocol import WeightDigests

_CHUNK = 2**22
"""Words of 8 bytes that are summed at a time."""
_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""An odd number, so that each changed word changes the sum."""


def weight_digests(buckets: Iterable[Bucket]) -> WeightDigests:
    return {name: (_digest(tensor), _norm(tensor)) for bucket in buckets for name, tensor in bucket}


@torch.no_grad()
def _digest(tensor: torch.Tensor) -> str:
    """The sum of all words of 8 bytes, each times an odd number that depends on its place, modulo 2**64."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    data = torch.nn.functional.pad(data, (0, -len(data) % 8)) if len(data) % 8 or data.storage_offset() % 8 else data
    words = data.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK]
        places = torch.arange(start, start + len(chunk), dtype=torch.int64, device=tensor.device)
        # Integers wrap around. The shift carries high bits down, so that differences in them do not cancel.
        mixed = (chunk ^ (chunk >> 29)) * _FACTOR
        total += (mixed * (2 * places + 1)).sum()
    return f"{int(total) % 2**64:016x}"


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))
