"""Many copies between fixed addresses, planned once and then executed with few calls: no Python work per tensor.

Tensors that are contiguous on both sides are copied as integers of the widest type that fits, adjacent ones together.
All others are copied view by view, still within one call. A `CopyPlan` copies between fixed tensors, a `Replay` from
any buffer that holds the same bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Integer dtype by its size in bytes; widest first."""
_BUCKET = 0
"""Id of a bucket's memory in `ByteCopy`; never the id of a storage."""

type _Groups = list[tuple[list[Tensor], list[Tensor]]]
"""Targets and sources for one call: within a group all dtypes are equal."""


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
        """Size in bytes of the widest integers that divide offsets and length."""
        return next(width for width in _WIDTHS if not (self.to % width or self.start % width or self.nbytes % width))


def coalesced(copies: Iterable[ByteCopy]) -> list[ByteCopy]:
    """The same copies, ordered by source; copies that are adjacent on both sides are joined."""
    joined: list[ByteCopy] = []
    for copy in sorted(copies, key=lambda copy: (copy.source, copy.start)):
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
        views: list[tuple[Tensor, Tensor]] = []
        for target, source in pairs:
            if target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
                memories |= {storage_of(tensor): tensor.untyped_storage() for tensor in (target, source)}
                ends = storage_of(target), first_byte(target), storage_of(source), first_byte(source)
                byte_copies.append(ByteCopy(*ends, target.nbytes))
            elif target.numel():
                views.append((target, source))
        for copy in coalesced(byte_copies):
            target = _view_of(memories[copy.target], copy.to, copy)
            views.append((target, _view_of(memories[copy.source], copy.start, copy)))
        self._groups = _by_dtypes(views)

    def __len__(self) -> int:
        return sum(len(targets) for targets, _ in self._groups)

    def run(self) -> None:
        """Run the copies; on a GPU, asynchronously on the current stream."""
        _copy_all(self._groups)


@dataclass(frozen=True, slots=True)
class TracedCopy:
    """A copy from a bucket into a parameter. `dtype`, `shape` and `stride` are the source's."""

    target: Tensor
    dtype: torch.dtype
    offset: int
    """Offset of the source in the bucket, in elements of `dtype`."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()


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
            if target.dtype == copy.dtype and target.is_contiguous() and copy.is_contiguous:
                memories[storage_of(target)] = target.untyped_storage()
                start = copy.offset * copy.dtype.itemsize
                byte_copies.append(ByteCopy(storage_of(target), first_byte(target), _BUCKET, start, target.nbytes))
            else:
                self._views.append(copy)
        ends: dict[int, int] = {}
        for byte_copy in coalesced(byte_copies):
            view, width = _view_of(memories[byte_copy.target], byte_copy.to, byte_copy), byte_copy.width
            start, length = byte_copy.start // width, byte_copy.nbytes // width
            pieces = self._pieces.setdefault(width, _Pieces())
            end = ends.get(width, 0)
            if start < end:
                # Further targets of a source with several targets.
                self._views.append(TracedCopy(view, _WIDTHS[width], start, (length,), (1,)))
                continue
            pieces.targets.append(view)
            pieces.lengths += [start - end, length]
            pieces.picked.append(len(pieces.lengths) - 1)
            ends[width] = start + length
        self._bound: tuple[Tensor, _Groups] | None = None

    def run(self, buffer: Tensor) -> None:
        """Copy from `buffer`, uint8, into the parameters. Passing the same buffer object again is fastest."""
        if self._bound is None or self._bound[0] is not buffer:
            self._bound = buffer, self._bind(buffer)
        _copy_all(self._bound[1])

    def release_buffer(self) -> None:
        self._bound = None

    def _bind(self, buffer: Tensor) -> _Groups:
        memory = buffer.untyped_storage()
        assert buffer.storage_offset() == 0, "a buffer begins at the start of its memory"
        groups = []
        for width, pieces in self._pieces.items():
            # One split for all copies: slicing the buffer for each would take most of the time.
            numbers = buffer[: len(buffer) // width * width].view(_WIDTHS[width])
            cut = numbers.split([*pieces.lengths, len(numbers) - sum(pieces.lengths)])
            groups.append((pieces.targets, [cut[index] for index in pieces.picked]))
        views = []
        for copy in self._views:
            source = torch.empty(0, dtype=copy.dtype, device=buffer.device)
            views.append((copy.target, source.set_(memory, copy.offset, copy.shape, copy.stride)))
        return [*groups, *_by_dtypes(views)]


def _by_dtypes(pairs: Iterable[tuple[Tensor, Tensor]]) -> _Groups:
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        if target.dtype == source.dtype:
            target, source = as_bytes(target), as_bytes(source)
        targets, sources = groups.setdefault((target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)
    return list(groups.values())


@torch.no_grad()
def _copy_all(groups: _Groups) -> None:
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


def _view_of(memory: torch.UntypedStorage, at: int, copy: ByteCopy) -> Tensor:
    """One end of a copy as a flat integer tensor of the copy's `width`."""
    view = torch.empty(0, dtype=_WIDTHS[copy.width], device=memory.device)
    return view.set_(memory, at // copy.width, (copy.nbytes // copy.width,), (1,))
