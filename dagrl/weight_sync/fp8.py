"""Quantises weights to fp8 between a trainer's export and a transport.

Weights become e4m3 values with float32 scales: one for each block of 128 x 128, as in DeepSeek-V3 (arXiv 2412.19437,
section 3.3), or one for each output channel, which is a row. The arithmetic is that of transformers'
``finegrained_fp8``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from dagrl.config.fp8_weights import Fp8Weights, Granularity, scaled_part
from dagrl.weight_sync.copies import CopyPlan
from dagrl.weight_sync.exporter import WeightExporter
from dagrl.weight_sync.manifest import BucketLayout, Described, Manifest
from dagrl.weight_sync.staging import ReleasableBuffer

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_LEAST_PEAK = 1e-30
"""Parts below this magnitude become zeros, because their factor would overflow float32."""
_ELEMENTS = 2**25
"""Most elements that are quantised at once, which bounds the float32 copies."""


@torch.no_grad()
def quantise(weights: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
    """Quantise `weights`, [..., rows, columns], block by block or row by row.

    Returns float8_e4m3fn of the same shape, and the factors that restore the weights, float32
    [..., ceil(rows / 128), ceil(columns / 128)] or [..., rows, 1]. A value of a part with the largest magnitude `m`
    changes by at most a 16th of itself, or ``m / 448 / 1024``, whichever is more.
    """
    rows, columns = weights.shape[-2:]
    height, width = scaled_part(granularity, weights.shape)
    padded = torch.nn.functional.pad(weights.float(), (0, -columns % width, 0, -rows % height))
    parts = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    peaks = parts.abs().amax((-3, -1), keepdim=True)
    factors = torch.where(peaks > 0, _LARGEST / peaks.clamp(min=_LEAST_PEAK), 1.0)
    values = (parts * factors).clamp_(-_LARGEST, _LARGEST).to(FP8)
    return values.flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns], (1.0 / factors).squeeze(-1).squeeze(-2)


class Fp8Exporter:
    """A `WeightExporter` of another one's weights, in fp8 as `Fp8Weights` chooses.

    A scale follows its weight in the bucket, which has half the bytes.
    """

    def __init__(self, exporter: WeightExporter, fp8: Fp8Weights) -> None:
        self._exporter, self._fp8 = exporter, fp8
        self.device, self.process_group = exporter.device, exporter.process_group
        placed = [tensor for bucket in exporter.manifest.buckets for tensor in bucket.tensors]
        self._chosen = fp8.choose((tensor.name, tensor.shape) for tensor in placed)
        self.manifest = Manifest(tuple(map(self._layout, exporter.manifest.buckets)))
        self._rank = 0 if self.process_group is None else dist.get_rank()
        owned = (bucket.nbytes for bucket in exporter.manifest.buckets if bucket.owner == self._rank)
        self._scratch = ReleasableBuffer(max(owned, default=0), self.device)
        self._scratch.release()
        self._plans: dict[int, tuple[Tensor, CopyPlan, list[_Alike]]] = {}
        """Index of a bucket -> the buffer it was planned for, copies, and weights to quantise."""

    @contextmanager
    def exporting(self) -> Iterator[None]:
        """See `WeightExporter.exporting`. Also holds a bucket of the other exporter."""
        with self._exporter.exporting():
            self._scratch.allocate()
            try:
                yield
            finally:
                if self.device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
                self._scratch.release()

    @torch.no_grad()
    def fill(self, index: int, buffer: Tensor | None) -> None:
        if buffer is None or self.manifest.buckets[index].owner != self._rank:
            self._exporter.fill(index, None)
            return
        self._exporter.fill(index, self._scratch.bytes)
        if index not in self._plans or self._plans[index][0] is not buffer:
            self._plans[index] = buffer, *self._plan(index, buffer)
        _, copies, alike = self._plans[index]
        copies.run()
        for group in alike:
            group.run()

    def _layout(self, bucket: BucketLayout) -> BucketLayout:
        described: list[Described] = []
        for tensor in bucket.tensors:
            if tensor.name in self._chosen:
                described.append((tensor.name, FP8, tensor.shape))
                scales = tensor.name + self._fp8.scale_suffix
                described.append((scales, torch.float32, self._fp8.scale_shape(tensor.shape)))
            else:
                described.append((tensor.name, getattr(torch, tensor.dtype), tensor.shape))
        return replace(BucketLayout.of(described), owner=bucket.owner)

    def _plan(self, index: int, buffer: Tensor) -> tuple[CopyPlan, list[_Alike]]:
        places = dict(self.manifest.buckets[index].views(buffer))
        copied: list[tuple[Tensor, Tensor]] = []
        alike: dict[tuple[int, ...], _Alike] = {}
        for name, source in self._exporter.manifest.buckets[index].views(self._scratch.bytes):
            if name in self._chosen:
                group = alike.setdefault(tuple(source.shape), _Alike(self._fp8.granularity, [], [], []))
                group.sources.append(source)
                # Copies of many tensors at once support bytes, but not fp8 in every version.
                group.values.append(places[name].view(torch.uint8))
                group.scales.append(places[name + self._fp8.scale_suffix])
            else:
                copied.append((places[name], source))
        return CopyPlan(copied), list(alike.values())


@dataclass(frozen=True, slots=True)
class _Alike:
    """Weights of one shape, such as those of experts."""

    granularity: Granularity
    sources: list[Tensor]
    values: list[Tensor]
    scales: list[Tensor]

    def run(self) -> None:
        count = max(1, _ELEMENTS // self.sources[0].numel())
        for first in range(0, len(self.sources), count):
            part = slice(first, first + count)
            values, scales = quantise(torch.stack(self.sources[part]), self.granularity)
            torch._foreach_copy_(self.values[part], list(values.view(torch.uint8).unbind()))
            torch._foreach_copy_(self.scales[part], list(scales.unbind()))
