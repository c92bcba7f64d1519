"""Many copies between fixed addresses, planned once and then executed with few calls: no Python work per tensor.

Tensors that are contiguous on both sides are copied as integers of the widest type that fits, adjacent ones together.
All others are copied view by view, still within one call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Integer dtype by its size in bytes; widest first."""


@dataclass(frozen=True, slots=True)
class ByteCopy:
    """A copy of contiguous bytes."""

    target: int
    """Caller's id of the memory to copy into."""
    to: int
    """First byte in the target."""
    source: int
    """Caller's id of the memory to copy from."""
    start: int
    """First byte in the source."""
    nbytes: int

    @property
    def width(self) -> int:
        """Size in bytes of the widest integers that offsets and length are multiples of."""
        return next(width for width in WIDTHS if not (self.to % width or self.start % width or self.nbytes % width))


def coalesced(copies: Iterable[ByteCopy]) -> list[ByteCopy]:
    """The same copies, ordered by source; copies that are adjacent on both sides are joined."""
    joined: list[ByteCopy] = []
    for copy in sorted(copies, key=lambda each: (each.source, each.start)):
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.target, last.source) == (copy.target, copy.source)
            and (last.to + last.nbytes, last.start + last.nbytes) == (copy.to, copy.start)
        ):
            joined[-1] = ByteCopy(last.target, last.to, last.source, last.start, last.nbytes + copy.nbytes)
        elif copy.nbytes:
            joined.append(copy)
    return joined


class CopyPlan:
    """Copies between fixed views, to be run any number of times."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """`pairs` of target and source have equal shapes; dtypes may differ. Targets must not overlap."""
        memories: dict[int, torch.UntypedStorage] = {}
        byte_copies: list[ByteCopy] = []
        self._groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in pairs:
            if target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
                for tensor in (target, source):
                    memories[storage_of(tensor)] = tensor.untyped_storage()
                to, start = (first_byte(each) for each in (target, source))
                byte_copies.append(ByteCopy(storage_of(target), to, storage_of(source), start, target.nbytes))
            elif target.numel():
                alike = target.dtype == source.dtype
                self._add(*((as_bytes(target), as_bytes(source)) if alike else (target, source)))
        for copy in coalesced(byte_copies):
            ends = (copy.target, copy.to), (copy.source, copy.start)
            self._add(*(view_of(memories[memory], at, copy) for memory, at in ends))

    def _add(self, target: Tensor, source: Tensor) -> None:
        targets, sources = self._groups.setdefault((target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)

    def __len__(self) -> int:
        return sum(len(targets) for targets, _ in self._groups.values())

    def run(self) -> None:
        """Run the copies; on a GPU, asynchronously on the current stream."""
        copy_all(self._groups.values())


@torch.no_grad()
def copy_all(groups: Iterable[tuple[list[Tensor], list[Tensor]]]) -> None:
    """Copy sources into targets, one call per group. Within a group all dtypes are equal."""
    for targets, sources in groups:
        torch._foreach_copy_(targets, sources)


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor, or a view of uint8 of one in fp8, for which operations on many tensors have no kernels."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else tensor


def storage_of(tensor: Tensor) -> int:
    """Id of the storage behind a tensor, valid while the storage is referenced, even if its memory is released."""
    return tensor.untyped_storage()._cdata


def first_byte(view: Tensor) -> int:
    """Offset of a view in its storage, in bytes."""
    return int(view.storage_offset()) * view.element_size()


def view_of(memory: torch.UntypedStorage, at: int, copy: ByteCopy) -> Tensor:
    """One end of a copy as a flat integer tensor of the copy's `width`."""
    view = torch.empty(0, dtype=WIDTHS[copy.width], device=memory.device)
    return view.set_(memory, at // copy.width, (copy.nbytes // copy.width,), (1,))
