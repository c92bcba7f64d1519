"""Buckets as flat byte arrays for Ray's object store; this module does not use Ray.

Bit patterns are kept, including those of bfloat16 and float8, which numpy lacks.
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
    """A bucket as one array of bytes, with its layout."""

    layout: BucketLayout
    data: np.ndarray
    """uint8, flat; the part to put into an object store."""

    def unpack(self) -> Bucket:
        """The tensors, as read-only views of `data`."""
        # Memory of an object store is read-only; from_dlpack accepts it, from_numpy warns.
        return self.layout.views(torch.from_dlpack(self.data))


def packed(exporter: WeightExporter, rank: int) -> Iterator[tuple[int, PackedBucket]]:
    """The buckets that a rank owns, with their indices; each is valid until the next is requested. Collective."""
    buckets = exporter.manifest.buckets
    largest = max((layout.nbytes for layout in buckets if layout.owner == rank), default=0)
    with exporter.exporting():
        buffer = torch.empty(largest, dtype=torch.uint8, device=exporter.device)
        for index, layout in enumerate(buckets):
            is_own = layout.owner == rank
            exporter.fill(index, buffer if is_own else None)
            if is_own:
                yield index, PackedBucket(layout, buffer[: layout.nbytes].cpu().numpy())
