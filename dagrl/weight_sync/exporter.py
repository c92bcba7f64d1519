"""What a trainer offers to whoever sends its weights: buckets that are the same at every sync, filled one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist

from dagrl.weight_sync.manifest import Bucket, BucketLayout, Manifest


class WeightExporter(Protocol):
    """One rank's share in giving out the weights of an engine. All ranks make one and call it alike."""

    manifest: Manifest
    """What there is to give, the same on all ranks."""
    device: torch.device
    """Where the weights are."""
    everyone: dist.ProcessGroup | None
    """A group of all ranks; None where there is only one."""

    def exporting(self) -> AbstractContextManager[None]:
        """Within the context buckets can be filled; what it takes in memory is free outside. Collective."""
        ...

    def fill(self, index: int, buffer: torch.Tensor | None) -> None:
        """Write a bucket into `buffer`, uint8 [its bytes or more] on `device`, which rank 0 gives. Collective.

        Buckets are filled in order, each once, within one context; another round begins with bucket 0. On a GPU the
        work is queued on the current stream. It costs least where a bucket gets the same buffer at every sync.
        """
        ...


def exported(exporter: WeightExporter, is_root: bool) -> Iterator[Bucket]:
    """All weights, bucket by bucket: tensors with memory of their own on the root, as many empty buckets elsewhere."""
    with exporter.exporting():
        for index, layout in enumerate(exporter.manifest.buckets):
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=exporter.device) if is_root else None
            exporter.fill(index, buffer)
            # What leaves must not drag its buffer along.
            yield [] if buffer is None else [(name, tensor.clone()) for name, tensor in layout.views(buffer)]


class BucketExporter:
    """An exporter of buckets that are there already, on the CPU."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = [bucket for bucket in buckets if bucket]
        described = ([(name, t.dtype, tuple(t.shape)) for name, t in bucket] for bucket in self._buckets)
        self.manifest = Manifest(tuple(map(BucketLayout.of, described)))
        self.device = torch.device("cpu")
        self.everyone: dist.ProcessGroup | None = None

    def exporting(self) -> AbstractContextManager[None]:
        """See `WeightExporter.exporting`."""
        return nullcontext()

    @torch.no_grad()
    def fill(self, index: int, buffer: torch.Tensor | None) -> None:
        """See `WeightExporter.fill`."""
        if buffer is not None:
            views = self.manifest.buckets[index].views(buffer)
            for (_, place), (_, tensor) in zip(views, self._buckets[index], strict=True):
                place.copy_(tensor)


class IteratedExporter:
    """An exporter for an engine that can only go through its weights from first to last, whole tensor by tensor."""

    def __init__(
        self,
        start: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        bucket_bytes: int,
        device: torch.device,
        present: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`start` begins a round through all tensors, on all ranks, within the context that `present` gives.

        Collective, and takes a round to see what there is.
        """
        self._start, self._present, self.device = start, present, device
        self.everyone = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        with present(), torch.no_grad():
            tensors = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in start()]
        self.manifest = Manifest.cut(([tensor] for tensor in tensors), bucket_bytes)
        self._round: Iterator[tuple[str, torch.Tensor]] = iter(())

    def exporting(self) -> AbstractContextManager[None]:
        """See `WeightExporter.exporting`."""
        return self._present()

    @torch.no_grad()
    def fill(self, index: int, buffer: torch.Tensor | None) -> None:
        """See `WeightExporter.fill`."""
        if index == 0:
            self._round = self._start()
        for placed in self.manifest.buckets[index].tensors:
            name, tensor = next(self._round)
            assert name == placed.name, f"{name} comes where {placed.name} did"
            if buffer is not None:
                placed.view(buffer).copy_(tensor)
