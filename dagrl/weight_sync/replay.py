"""Repeats the copies of a recorded load, from any buffer that holds the same bucket, with a few calls per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dagrl.weight_sync.copies import WIDTHS, ByteCopy, as_bytes, coalesced, copy_all, first_byte, storage_of, view_of
from dagrl.weight_sync.copy_tracer import TracedCopy

_BUCKET = 0
"""Id of the bucket's memory in `ByteCopy`; never the id of a storage."""


@dataclass(slots=True)
class _Pieces:
    """Copies of one integer width, in the order of their sources in the bucket."""

    targets: list[Tensor] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Lengths of all stretches of the bucket up to the last copy, gaps included."""
    picked: list[int] = field(default_factory=list)
    """Indices into `lengths` of the copies."""


class Replay:
    """The copies from one bucket into a model."""

    def __init__(self, copied: Sequence[TracedCopy]) -> None:
        self._pieces: dict[int, _Pieces] = {}
        self._views: list[TracedCopy] = []
        memories: dict[int, torch.UntypedStorage] = {}
        byte_copies = []
        for copy in copied:
            target = copy.target
            if target.dtype == copy.dtype and target.is_contiguous() and _is_contiguous(copy):
                memories[storage_of(target)] = target.untyped_storage()
                start = copy.offset * copy.dtype.itemsize
                byte_copies.append(ByteCopy(storage_of(target), first_byte(target), _BUCKET, start, target.nbytes))
            else:
                self._views.append(copy)
        ends: dict[int, int] = {}
        for byte_copy in coalesced(byte_copies):
            view, width = view_of(memories[byte_copy.target], byte_copy.to, byte_copy), byte_copy.width
            start, length = byte_copy.start // width, byte_copy.nbytes // width
            pieces = self._pieces.setdefault(width, _Pieces())
            end = ends.get(width, 0)
            if start < end:
                # A source with several targets: all but the first.
                self._views.append(TracedCopy(view, WIDTHS[width], start, (length,), (1,)))
                continue
            pieces.targets.append(view)
            pieces.lengths += [start - end, length]
            pieces.picked.append(len(pieces.lengths) - 1)
            ends[width] = start + length
        self._bound: tuple[Tensor, list[tuple[list[Tensor], list[Tensor]]]] | None = None

    def run(self, buffer: Tensor) -> None:
        """Copy from `buffer`, uint8, into the parameters. Passing the same buffer object again is fastest."""
        if self._bound is None or self._bound[0] is not buffer:
            self._bound = buffer, self._bind(buffer)
        copy_all(self._bound[1])

    def release_buffer(self) -> None:
        self._bound = None

    def _bind(self, buffer: Tensor) -> list[tuple[list[Tensor], list[Tensor]]]:
        memory = buffer.untyped_storage()
        assert buffer.storage_offset() == 0, "a buffer begins at the start of its memory"
        groups = []
        for width, pieces in self._pieces.items():
            # One split for all copies: slicing the buffer for each would take most of the time.
            numbers = buffer[: len(buffer) // width * width].view(WIDTHS[width])
            cut = numbers.split([*pieces.lengths, len(numbers) - sum(pieces.lengths)])
            groups.append((pieces.targets, [cut[index] for index in pieces.picked]))
        by_dtypes: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for copy in self._views:
            source = torch.empty(0, dtype=copy.dtype, device=buffer.device)
            source.set_(memory, copy.offset, copy.shape, copy.stride)
            target = copy.target
            if target.dtype == copy.dtype:
                target, source = as_bytes(target), as_bytes(source)
            targets, sources = by_dtypes.setdefault((target.dtype, source.dtype), ([], []))
            targets.append(target)
            sources.append(source)
        return [*groups, *by_dtypes.values()]


def _is_contiguous(copy: TracedCopy) -> bool:
    length = 1
    for size, stride in zip(reversed(copy.shape), reversed(copy.stride), strict=True):
        if size != 1 and stride != length:
            return False
        length *= size
    return True
