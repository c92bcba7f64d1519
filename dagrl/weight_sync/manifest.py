"""What travels when weights are synced: buckets of named tensors, each at a fixed place. The same at every sync.

So sender and taker agree on it once, and afterwards only bytes travel. The tensors keep their bit patterns.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

_ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every dtype's size."""

type Bucket = list[tuple[str, torch.Tensor]]
"""Some weights by their Hugging Face names, full (not split over ranks), on the CPU or the engine's device."""
Described = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """One tensor, and where it lies in its bucket."""

    name: str
    dtype: str
    """Torch's name of it, without ``torch.``."""
    shape: tuple[int, ...]
    offset: int
    """Byte at which it begins."""

    @property
    def nbytes(self) -> int:
        """Bytes that it occupies."""
        return math.prod(self.shape) * _torch_dtype(self.dtype).itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor in `buffer`, uint8 [bytes of the bucket]; it shares the buffer's memory."""
        return buffer[self.offset : self.offset + self.nbytes].view(_torch_dtype(self.dtype)).view(self.shape)


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The tensors of one bucket, one behind the other."""

    tensors: tuple[PlacedTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last, and at least some: torch does not view an empty array as another dtype."""
        return (
            max((tensor.offset + _aligned(tensor.nbytes) for tensor in self.tensors), default=_ALIGNMENT) or _ALIGNMENT
        )

    @staticmethod
    def of(tensors: Iterable[Described]) -> BucketLayout:
        """Lay tensors out in the given order."""
        placed, offset = [], 0
        for name, dtype, shape in tensors:
            placed.append(PlacedTensor(name, str(dtype).removeprefix("torch."), tuple(shape), offset))
            offset += _aligned(placed[-1].nbytes)
        return BucketLayout(tuple(placed))

    def views(self, buffer: torch.Tensor) -> Bucket:
        """All tensors in `buffer`, uint8 [nbytes or more], by name."""
        return [(tensor.name, tensor.view(buffer)) for tensor in self.tensors]


@dataclass(frozen=True)
class Manifest:
    """All buckets of a model, in the order in which they are sent."""

    buckets: tuple[BucketLayout, ...]

    @staticmethod
    def cut(groups: Iterable[Sequence[Described]], bucket_bytes: int) -> Manifest:
        """Put groups of tensors into buckets, in order; a new one begins where a group would not fit any more.

        A group stays together, so one alone may be larger than a bucket.
        """
        buckets: list[list[Described]] = []
        filled = 0
        for group in groups:
            size = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in group)
            if not buckets or filled + size > bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].extend(group)
            filled += size
        return Manifest(tuple(map(BucketLayout.of, buckets)))

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in order."""
        return [tensor.name for bucket in self.buckets for tensor in bucket.tensors]

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket: what a buffer has to hold."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    def room(self, buffers: int) -> list[int]:
        """Bytes that each of some buffers has to hold, where bucket `index` is put into buffer ``index % buffers``."""
        sizes = [bucket.nbytes for bucket in self.buckets]
        return [max(sizes[first::buffers], default=0) for first in range(buffers)]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for bucket in self.buckets for tensor in bucket.tensors)

    @cached_property
    def digest(self) -> str:
        """Names the manifest: another one has another."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()

    def to_json(self) -> Any:
        """As plain lists."""
        return [[[t.name, t.dtype, list(t.shape), t.offset] for t in bucket.tensors] for bucket in self.buckets]

    @staticmethod
    def from_json(lists: Any) -> Manifest:
        """Undo `to_json`."""
        return Manifest(
            tuple(
                BucketLayout(tuple(PlacedTensor(name, dtype, tuple(shape), at) for name, dtype, shape, at in bucket))
                for bucket in lists
            )
        )


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), f"{name} is not a dtype"
    return dtype
