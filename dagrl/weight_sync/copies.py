"""Many copies between fixed places, planned once and then made with few calls: no Python for each tensor.

What is contiguous on both sides moves as bits, in the widest whole numbers that fit, neighbours joined; the rest moves
view by view, still within one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Bytes, and the whole numbers of so many; widest first."""


@dataclass(frozen=True, slots=True)
class ByteCopy:
    """Bytes that lie side by side, and where they go."""

    target: int
    """Which memory they go to: a number that the user of runs gives it."""
    to: int
    """Byte of it at which they begin."""
    source: int
    """Which memory they come from."""
    start: int
    """Byte of it at which they begin."""
    nbytes: int

    @property
    def width(self) -> int:
        """Bytes of the widest whole numbers that they can be seen as."""
        return next(width for width in WIDTHS if not (self.to % width or self.start % width or self.nbytes % width))


def coalesced(runs: Iterable[ByteCopy]) -> list[ByteCopy]:
    """The same copies in fewer runs, by source: what goes on on both sides is one."""
    joined: list[ByteCopy] = []
    for run in sorted(runs, key=lambda each: (each.source, each.start)):
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.target, last.source) == (run.target, run.source)
            and (last.to + last.nbytes, last.start + last.nbytes) == (run.to, run.start)
        ):
            joined[-1] = ByteCopy(last.target, last.to, last.source, last.start, last.nbytes + run.nbytes)
        elif run.nbytes:
            joined.append(run)
    return joined


class CopyPlan:
    """Copies between views that stay where they are, whatever their memory holds at the time."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """`pairs` are target and source, of one shape; their dtypes may differ. Targets do not overlap."""
        memories: dict[int, torch.UntypedStorage] = {}
        runs: list[ByteCopy] = []
        self._groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in pairs:
            if target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
                for tensor in (target, source):
                    memories[storage_of(tensor)] = tensor.untyped_storage()
                to, start = (first_byte(each) for each in (target, source))
                runs.append(ByteCopy(storage_of(target), to, storage_of(source), start, target.nbytes))
            elif target.numel():
                self._add(target, source)
        for run in coalesced(runs):
            self._add(*(view_of(memories[memory], at, run) for memory, at in _ends(run)))

    def _add(self, target: Tensor, source: Tensor) -> None:
        targets, sources = self._groups.setdefault((target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)

    def __len__(self) -> int:
        return sum(len(targets) for targets, _ in self._groups.values())

    def run(self) -> None:
        """Copy. On a GPU the copies are queued on the current stream."""
        copy_all(self._groups.values())


@torch.no_grad()
def copy_all(groups: Iterable[tuple[list[Tensor], list[Tensor]]]) -> None:
    """Copy targets from sources, each group with one call; in a group, dtypes are alike."""
    for targets, sources in groups:
        torch._foreach_copy_(targets, sources)


def storage_of(tensor: Tensor) -> int:
    """Names the memory behind a tensor, also while that memory is away; good for as long as it is referred to."""
    return tensor.untyped_storage()._cdata


def first_byte(view: Tensor) -> int:
    """Where a view begins in its memory."""
    return int(view.storage_offset()) * view.element_size()


def view_of(memory: torch.UntypedStorage, at: int, run: ByteCopy) -> Tensor:
    """The bytes of one end of `run`, flat, as the widest whole numbers that fit both ends."""
    view = torch.empty(0, dtype=WIDTHS[run.width], device=memory.device)
    return view.set_(memory, at // run.width, (run.nbytes // run.width,), (1,))


def _ends(run: ByteCopy) -> Sequence[tuple[int, int]]:
    return (run.target, run.to), (run.source, run.start)
