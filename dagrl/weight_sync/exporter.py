"""Exporters fill the buckets of a trainer's weights; the buckets are the same at every sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from dagrl.weight_sync.manifest import Bucket, BucketLayout, Manifest


class WeightExporter(Protocol):
    """Exports the weights of an engine. All of its ranks make the same calls."""

    manifest: Manifest
    """All buckets; the same on all ranks."""
    device: torch.device
    process_group: dist.ProcessGroup | None
    """All ranks; None if there is only one."""

    def exporting(self) -> AbstractContextManager[None]:
        """Context in which buckets can be filled; outside it, the exporter holds no extra memory. Collective."""

    def fill(self, index: int, buffer: torch.Tensor | None) -> None:
        """Write a bucket into `buffer`, uint8 [its bytes or more] on `device`; only the owner's is used. Collective.

        Ranks that hold no part of the bucket return at once, so different owners fill their buckets at the same time.
        Buckets are filled in order, each once per context; another round begins with bucket 0. On a GPU the work is
        queued on the current stream. Passing the same buffer for a bucket at every sync is fastest.
        """


def exported(exporter: WeightExporter, is_root: bool) -> Iterator[Bucket]:
    """All buckets, if the root owns them: copies of the tensors there, empty lists on other ranks. Collective."""
    with exporter.exporting():
        for index, layout in enumerate(exporter.manifest.buckets):
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=exporter.device) if is_root else None
            exporter.fill(index, buffer)
            # Clones, so that a tensor does not keep its whole buffer alive.
            yield [] if buffer is None else [(name, tensor.clone()) for name, tensor in layout.views(buffer)]


class BucketExporter:
    """Exports given buckets from the CPU."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = [bucket for bucket in buckets if bucket]
        described = ([(name, t.dtype, tuple(t.shape)) for name, t in bucket] for bucket in self._buckets)
        self.manifest = Manifest(tuple(map(BucketLayout.of, described)))
        self.device = torch.device("cpu")
        self.process_group: dist.ProcessGroup | None = None

    def exporting(self) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.no_grad()
    def fill(self, index: int, buffer: torch.Tensor | None) -> None:
        if buffer is not None:
            views = self.manifest.buckets[index].views(buffer)
            for (_, view), (_, tensor) in zip(views, self._buckets[index], strict=True):
                view.copy_(tensor)


class IteratedExporter:
    """Exports an iterator over full tensors."""

    def __init__(
        self,
        start: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        bucket_bytes: int,
        device: torch.device,
        present: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`start` returns an iterator over all tensors and is called on all ranks, within the context `present`.

        Collective; iterates once to learn names and shapes.
        """
        self._start, self._present, self.device = start, present, device
        self.process_group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        with present(), torch.no_grad():
            tensors = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in start()]
        self.manifest = Manifest.cut(([tensor] for tensor in tensors), bucket_bytes)
        self._round: Iterator[tuple[str, torch.Tensor]] = iter(())

    def exporting(self) -> AbstractContextManager[None]:
        return self._present()

    @torch.no_grad()
    def fill(self, index: int, buffer: torch.Tensor | None) -> None:
        if index == 0:
            self._round = self._start()
        for placed in self.manifest.buckets[index].tensors:
            name, tensor = next(self._round)
            assert name == placed.name, f"expected {placed.name}, got {name}"
            if buffer is not None:
                placed.view(buffer).copy_(tensor)


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """A bucket for Ray's object store: one array of bytes, with its layout.

    Bit patterns are kept, including those of bfloat16 and float8, which numpy lacks.
    """

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
