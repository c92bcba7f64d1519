"""The layout of all buckets of a model, which is the same at every sync.

Sender and receiver exchange it once; afterwards only bytes are sent. Tensors keep their bit patterns.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch

_ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every dtype's size."""

type Bucket = list[tuple[str, torch.Tensor]]
"""Full tensors (not split over ranks) by Hugging Face name, on the CPU or the engine's device."""
Described = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor and its offset in a bucket."""

    name: str
    dtype: str
    """Torch's name, without ``torch.``."""
    shape: tuple[int, ...]
    offset: int
    """First byte."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _torch_dtype(self.dtype).itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of `buffer`, uint8 [bytes of the bucket]."""
        return buffer[self.offset : self.offset + self.nbytes].view(_torch_dtype(self.dtype)).view(self.shape)


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The tensors of one bucket, one after the other."""

    tensors: tuple[PlacedTensor, ...]
    owner: int = 0
    """The trainer's rank that fills and sends the bucket."""

    @property
    def nbytes(self) -> int:
        """Size in bytes; never 0, because torch cannot view an empty array as another dtype."""
        return max(_ALIGNMENT, *(tensor.offset + _aligned(tensor.nbytes) for tensor in self.tensors), 0)

    @staticmethod
    def of(tensors: Iterable[Described]) -> BucketLayout:
        """Lay tensors out in the given order."""
        placed, offset = [], 0
        for name, dtype, shape in tensors:
            placed.append(PlacedTensor(name, str(dtype).removeprefix("torch."), tuple(shape), offset))
            offset += _aligned(placed[-1].nbytes)
        return BucketLayout(tuple(placed))

    def views(self, buffer: torch.Tensor) -> Bucket:
        """All tensors as views of `buffer`, uint8 [nbytes or more], by name."""
        return [(tensor.name, tensor.view(buffer)) for tensor in self.tensors]


@dataclass(frozen=True)
class Manifest:
    """All buckets of a model, in the order they are sent."""

    buckets: tuple[BucketLayout, ...]

    @staticmethod
    def cut(groups: Iterable[Sequence[Described]], bucket_bytes: int) -> Manifest:
        """Put groups of tensors into buckets of up to `bucket_bytes`, in order.

        A group is never split; a group larger than `bucket_bytes` gets a larger bucket.
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

    @staticmethod
    def cut_by_owner(groups: Mapping[int, Iterable[Sequence[Described]]], bucket_bytes: int) -> Manifest:
        """Cut the groups of each owner's rank as `cut` does. Buckets of different owners alternate."""
        cuts = [
            [replace(bucket, owner=owner) for bucket in Manifest.cut(own, bucket_bytes).buckets]
            for owner, own in groups.items()
        ]
        return Manifest(tuple(bucket for turn in zip_longest(*cuts) for bucket in turn if bucket is not None))

    @property
    def names(self) -> list[str]:
        return [tensor.name for bucket in self.buckets for tensor in bucket.tensors]

    def buffer_sizes(self, buffers: int) -> list[int]:
        """Bytes that each buffer must hold if bucket `index` goes to buffer ``index % buffers``."""
        sizes = [bucket.nbytes for bucket in self.buckets]
        return [max(sizes[first::buffers], default=0) for first in range(buffers)]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for bucket in self.buckets for tensor in bucket.tensors)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()

    def to_json(self) -> Any:
        return [
            [bucket.owner, [[t.name, t.dtype, list(t.shape), t.offset] for t in bucket.tensors]]
            for bucket in self.buckets
        ]

    @staticmethod
    def from_json(lists: Any) -> Manifest:
        return Manifest(
            tuple(
                BucketLayout(
                    tuple(PlacedTensor(name, dtype, tuple(shape), at) for name, dtype, shape, at in bucket), owner
                )
                for owner, bucket in lists
            )
        )


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), f"{name} is not a dtype"
    return dtype
