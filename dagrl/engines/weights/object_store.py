"""Weights as plain bytes: how a bucket travels from trainer to generators through an object store, without Ray's help.

The trainer packs a bucket into one flat array, which the runtime puts into the store; a generator unpacks the array it
gets from there into tensors on the same memory. Bit patterns are kept, bfloat16's and float8's too, which numpy lacks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from dagrl.engines.base import Bucket

_ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every dtype's size."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Where one tensor lies in a packed bucket."""

    name: str
    dtype: str
    """Torch's name of it, without ``torch.``."""
    shape: tuple[int, ...]
    offset: int
    """Byte at which it begins."""

    @property
    def nbytes(self) -> int:
        """Bytes it occupies."""
        return math.prod(self.shape) * _torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """A bucket as one array of bytes and the list of what is in it."""

    manifest: tuple[PackedTensor, ...]
    data: np.ndarray
    """uint8, flat; the part to put into an object store."""

    @staticmethod
    def pack(bucket: Bucket) -> PackedBucket:
        """Copy the tensors of `bucket`, on any device, into one array."""
        manifest = []
        offset = 0
        for name, tensor in bucket:
            packed = PackedTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)
            manifest.append(packed)
            offset += -(-packed.nbytes // _ALIGNMENT) * _ALIGNMENT
        # Never of size 0, for torch does not view an empty array as another dtype, and all tensors may be empty.
        data = np.zeros(max(offset, _ALIGNMENT), dtype=np.uint8)
        for packed, (_, tensor) in zip(manifest, bucket, strict=True):
            _view(torch.from_numpy(data), packed).copy_(tensor.detach())
        return PackedBucket(tuple(manifest), data)

    def unpack(self) -> Bucket:
        """The tensors, on the memory of `data`: they live as long as it does, and must not be written to."""
        # An object store's memory is read-only; dlpack, unlike from_numpy, takes such an array as it is.
        flat = torch.from_dlpack(self.data)
        return [(packed.name, _view(flat, packed)) for packed in self.manifest]


def weights_checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest (SHA-256, hexadecimal) of named tensors: names, dtypes, shapes and bits.

    It does not depend on their order, nor on how they were split into buckets, so that two engines compare by it.
    """
    digests = []
    for name, tensor in tensors:
        digest = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        digests.append(digest.digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def _view(flat: torch.Tensor, packed: PackedTensor) -> torch.Tensor:
    return flat[packed.offset : packed.offset + packed.nbytes].view(_torch_dtype(packed.dtype)).view(packed.shape)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), f"{name} is not a dtype"
    return dtype
