"""Makes the copies of a recorded load again, from any buffer that holds the same bucket: a few calls a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dagrl.weight_sync.copies import WIDTHS, ByteCopy, coalesced, copy_all, first_byte, storage_of, view_of
from dagrl.weight_sync.copy_tracer import TracedCopy

_BUCKET = 0
"""Names the bucket's memory among those of runs: an address is never that."""


@dataclass(slots=True)
class _Pieces:
    """Runs that are seen as whole numbers of one width, in the order in which they lie in the bucket."""

    targets: list[Tensor] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Of everything up to the last run, what is between runs included."""
    picked: list[int] = field(default_factory=list)
    """Which of these are the runs."""

    @property
    def end(self) -> int:
        return sum(self.lengths)


class Replay:
    """What a model copies out of one bucket."""

    def __init__(self, copied: Sequence[TracedCopy]) -> None:
        self._pieces: dict[int, _Pieces] = {}
        self._views: list[TracedCopy] = []
        memories: dict[int, torch.UntypedStorage] = {}
        runs = []
        for copy in copied:
            target = copy.target
            if target.dtype == copy.dtype and target.is_contiguous() and _lies_side_by_side(copy):
                memories[storage_of(target)] = target.untyped_storage()
                start = copy.offset * copy.dtype.itemsize
                runs.append(ByteCopy(storage_of(target), first_byte(target), _BUCKET, start, target.nbytes))
            else:
                self._views.append(copy)
        ends: dict[int, int] = {}
        for run in coalesced(runs):
            view = view_of(memories[run.target], run.to, run)
            place, length = run.start // run.width, run.nbytes // run.width
            pieces = self._pieces.setdefault(run.width, _Pieces())
            end = ends.get(run.width, 0)
            if place < end:
                # Of what goes to two places, all but the first.
                self._views.append(TracedCopy(view, WIDTHS[run.width], place, (length,), (1,)))
                continue
            pieces.targets.append(view)
            pieces.lengths += [place - end, length]
            pieces.picked.append(len(pieces.lengths) - 1)
            ends[run.width] = place + length
        self._bound: tuple[Tensor, list[tuple[list[Tensor], list[Tensor]]]] | None = None

    def run(self, buffer: Tensor) -> None:
        """Copy from `buffer`, uint8, into the parameters. It costs least where the buffer is the last one's object."""
        if self._bound is None or self._bound[0] is not buffer:
            self._bound = buffer, self._bind(buffer)
        copy_all(self._bound[1])

    def let_go(self) -> None:
        """Forget the last buffer, whose memory may be somebody else's."""
        self._bound = None

    def _bind(self, buffer: Tensor) -> list[tuple[list[Tensor], list[Tensor]]]:
        memory = buffer.untyped_storage()
        assert buffer.storage_offset() == 0, "a bucket begins where its memory does"
        groups = []
        for width, pieces in self._pieces.items():
            # Taken out of the buffer all at once: one by one, that would be most of the work.
            numbers = buffer[: len(buffer) // width * width].view(WIDTHS[width])
            cut = numbers.split([*pieces.lengths, len(numbers) - pieces.end])
            groups.append((pieces.targets, [cut[place] for place in pieces.picked]))
        by_dtypes: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for copy in self._views:
            source = torch.empty(0, dtype=copy.dtype, device=buffer.device)
            source.set_(memory, copy.offset, copy.shape, copy.stride)
            targets, sources = by_dtypes.setdefault((copy.target.dtype, copy.dtype), ([], []))
            targets.append(copy.target)
            sources.append(source)
        return [*groups, *by_dtypes.values()]


def _lies_side_by_side(copy: TracedCopy) -> bool:
    length = 1
    for size, stride in zip(reversed(copy.shape), reversed(copy.stride), strict=True):
        if size != 1 and stride != length:
            return False
        length *= size
    return True
