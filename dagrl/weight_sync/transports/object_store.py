"""Weights as plain bytes: how a bucket travels from trainer to generators through an object store, without Ray's help.

The trainer brings a bucket into one flat array, which the runtime puts into the store; a generator unpacks the array it
gets from there into tensors on the same memory. Bit patterns are kept, bfloat16's and float8's too, which numpy lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dagrl.weight_sync.exporter import WeightExporter
from dagrl.weight_sync.manifest import Bucket, BucketLayout


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """A bucket as one array of bytes and the list of what is in it."""

    layout: BucketLayout
    data: np.ndarray
    """uint8, flat; the part to put into an object store."""

    def unpack(self) -> Bucket:
        """The tensors, on the memory of `data`: they live as long as it does, and must not be written to."""
        # An object store's memory is read-only; dlpack, unlike from_numpy, takes such an array as it is.
        return self.layout.views(torch.from_dlpack(self.data))


def packed(exporter: WeightExporter, is_root: bool) -> Iterator[PackedBucket]:
    """All buckets of a trainer on the root, each good until the next is asked for; nothing elsewhere. Collective."""
    manifest = exporter.manifest
    with exporter.exporting():
        buffer = torch.empty(manifest.largest if is_root else 0, dtype=torch.uint8, device=exporter.device)
        for index, layout in enumerate(manifest.buckets):
            exporter.fill(index, buffer if is_root else None)
            if is_root:
                yield PackedBucket(layout, buffer[: layout.nbytes].cpu().numpy())
