"""Traces the copies that a model's loader makes from a bucket into the model's parameters.

A model's own loader joins and slices Hugging Face's tensors, with Python work for each of them, but in the end it only
copies views. A torch dispatch mode observes it: `CopyRecorder` records the copies, so that `replay` can repeat them
without the loader, and `WeightComparer` compares instead of copying, to verify a model's weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dagrl.weight_sync.copies import first_byte, storage_of

_DIMS_OF_EXPERTS = 3
_aten = torch.ops.aten
_CONSTANTS = {_aten.fill_.Scalar, _aten.zero_.default}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TracedCopy:
    """A copy from a bucket into a parameter. `dtype`, `shape` and `stride` are the source's."""

    target: Tensor
    dtype: torch.dtype
    offset: int
    """Offset of the source in the bucket, in elements of `dtype`."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(slots=True)
class _Writes:
    """Writes into the parameters, in elements, by storage."""

    writes: dict[int, list[tuple[np.ndarray, int, bool]]] = field(default_factory=dict)
    """Per write: the starts of its runs, their length, and whether it is a copy; else it is a fill."""

    def add(self, target: Tensor, *, copied: bool) -> None:
        self.writes.setdefault(storage_of(target), []).append((*_runs(target), copied))

    def overwritten(self) -> bool:
        """Whether any element was written after it had been copied to."""
        return any(map(_is_overwritten, self.writes.values()))

    def covered(self, parameter: Tensor) -> np.ndarray:
        """Number of elements written at least once, per slice of a parameter along its first dimension."""
        slices = parameter.shape[0] if parameter.dim() else 1
        memory = storage_of(parameter)
        if memory not in self.writes or not parameter.numel():
            return np.zeros(slices, dtype=np.int64)
        starts = np.concatenate([starts for starts, _, _ in self.writes[memory]])
        ends = np.concatenate([starts + length for starts, length, _ in self.writes[memory]])
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        # Count overlaps once.
        starts = np.maximum(starts, np.maximum.accumulate(np.concatenate([starts[:1], ends[:-1]])))
        ends = np.maximum(starts, ends)
        before = np.concatenate([[0], np.cumsum(ends - starts)])
        borders = int(parameter.storage_offset()) + parameter.numel() // slices * np.arange(slices + 1)
        begun = np.searchsorted(starts, borders, side="right")
        last = np.maximum(begun - 1, 0)
        below = before[last] + np.clip(borders - starts[last], 0, (ends - starts)[last])
        return np.diff(np.where(begun > 0, below, 0))


class _CopyTracer(TorchDispatchMode):
    """Observes every operation on a model's parameters and on one bucket."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters = parameters
        self._memories = {name: storage_of(tensor) for name, tensor in parameters.items()}
        self._names = {memory: name for name, memory in self._memories.items()}
        self._writes = _Writes()
        self._bucket = 0
        self._read: set[int] = set()
        self.obstacle = ""
        """Why the operations cannot be replayed as copies; empty if they can."""

    def watch(self, bucket: Tensor) -> None:
        """Trace reads of `bucket`, uint8, from now on."""
        self._bucket = storage_of(bucket)

    def missed(self) -> list[str]:
        """Parameters that were not written entirely, with the number of written elements.

        Parameters of experts may have padding, the same for each expert.
        """
        missed = []
        for name, tensor in self._parameters.items():
            covered = self._writes.covered(tensor)
            if covered.sum() < tensor.numel() and not _are_padded(tensor, covered):
                missed.append(f"{name} ({covered.sum()} of {tensor.numel()} elements)")
        return missed

    def moved(self) -> list[str]:
        """Parameters whose memory was replaced instead of written."""
        return [name for name, tensor in self._parameters.items() if storage_of(tensor) != self._memories[name]]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched = [(tensor, storage_of(tensor)) for tensor in _tensors((args, kwargs))]
        if func.is_view:
            result = func(*args, **kwargs)
            # `contiguous`, for example, may copy.
            if all(storage_of(tensor) in {memory for _, memory in touched} for tensor in _tensors(result)):
                return result
        self._read.update(first_byte(tensor) for tensor, memory in touched if memory == self._bucket)
        if func.is_view:
            return result
        parameter = self._names.get(touched[0][1]) if touched else None
        if parameter is not None and func is _aten.copy_.default:
            target, source = args[:2]
            self._writes.add(target, copied=True)
            if storage_of(source) != self._bucket:
                self._record_obstacle(f"{parameter} is computed from the weights, not copied")
            return self._copy(func, target, source, args, kwargs)
        if parameter is not None and func in _CONSTANTS:
            self._writes.add(args[0], copied=False)
            return self._fill(func, args[0], args[1] if len(args) > 1 else 0.0, args, kwargs)
        if any(memory == self._bucket or memory in self._names for _, memory in touched):
            self._record_obstacle(f"{func} changes weights")
        return func(*args, **kwargs)

    def _copy(self, func: Any, target: Tensor, source: Tensor, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def _fill(self, func: Any, target: Tensor, value: float, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def _record_obstacle(self, obstacle: str) -> None:
        self.obstacle = self.obstacle or obstacle


class CopyRecorder(_CopyTracer):
    """Lets a model load, and records the copies."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self._copied: list[TracedCopy] = []
        self._filled: list[tuple[Tensor, float]] = []

    def constants(self) -> list[tuple[Tensor, float]]:
        """Memory to fill before the copies, with its value: padding of experts, and what the loader filled."""
        padded = [
            tensor.detach()
            for tensor in self._parameters.values()
            if (covered := self._writes.covered(tensor)).sum() < tensor.numel() and _are_padded(tensor, covered)
        ]
        return [*((tensor, 0.0) for tensor in padded), *self._filled]

    def overwrites(self) -> bool:
        """Whether a copy was overwritten: then the order matters, which `replay` does not keep."""
        return self._writes.overwritten()

    def pop_copies(self) -> tuple[list[TracedCopy], set[int]]:
        """The copies since the last call, and the byte offsets of all views of the bucket that were read."""
        copies = self._copied, self._read
        self._copied, self._read = [], set()
        return copies

    def _copy(self, func: Any, target: Tensor, source: Tensor, args: Any, kwargs: Any) -> Any:
        if storage_of(source) == self._bucket:
            # copy_ broadcasts the source.
            wide = source.expand(target.shape)
            where = int(wide.storage_offset()), tuple(wide.shape), tuple(wide.stride())
            self._copied.append(TracedCopy(target.detach(), source.dtype, *where))
        return func(*args, **kwargs)

    def _fill(self, func: Any, target: Tensor, value: float, args: Any, kwargs: Any) -> Any:
        if target.numel():
            self._filled.append((target.detach(), value))
        return func(*args, **kwargs)


class WeightComparer(_CopyTracer):
    """Runs a model's loader without writing, and counts the elements that differ bitwise."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self._differing: dict[str, list[Tensor]] = {}

    def differing(self) -> dict[str, int]:
        counts = {name: int(torch.stack(each).sum()) for name, each in self._differing.items()}
        return {name: count for name, count in counts.items() if count}

    def _copy(self, func: Any, target: Tensor, source: Tensor, args: Any, kwargs: Any) -> Any:
        return self._compare(target, source.to(device=target.device, dtype=target.dtype).expand(target.shape))

    def _fill(self, func: Any, target: Tensor, value: float, args: Any, kwargs: Any) -> Any:
        return self._compare(target, torch.full_like(target, value))

    def _compare(self, target: Tensor, sent: Tensor) -> Tensor:
        bits = _BITS[target.element_size()]
        differs = target.view(bits) != sent.contiguous().view(bits)
        self._differing.setdefault(self._names[storage_of(target)], []).append(differs.sum())
        return target


def _is_overwritten(writes: Sequence[tuple[np.ndarray, int, bool]]) -> bool:
    counts = [len(starts) for starts, _, _ in writes]
    begins = np.concatenate([starts for starts, _, _ in writes])
    ends = np.concatenate([starts + length for starts, length, _ in writes])
    turns, copied = np.repeat(np.arange(len(counts)), counts), np.repeat([each for _, _, each in writes], counts)
    order = np.argsort(begins[copied], kind="stable")
    copy_begins, copy_ends, copy_turns = (each[copied][order] for each in (begins, ends, turns))
    if (copy_begins[1:] < copy_ends[:-1]).any():
        return True
    # The copies that a fill overlaps are contiguous in this order; compare it with the earliest of them.
    first = np.searchsorted(copy_ends, begins[~copied], side="right")
    beyond = np.searchsorted(copy_begins, ends[~copied], side="left")
    covers = first < beyond
    if not covers.any():
        return False
    spans = np.stack([first, beyond], axis=1)[covers].ravel()
    earliest = np.minimum.reduceat(np.append(copy_turns, len(counts)), spans)[::2]
    return bool((earliest < turns[~copied][covers]).any())


def _are_padded(tensor: Tensor, covered: np.ndarray) -> bool:
    """Whether the same part of each expert was written, the rest being padding."""
    return tensor.dim() == _DIMS_OF_EXPERTS and len(set(covered)) == 1 and covered[0] > 0


def _runs(view: Tensor) -> tuple[np.ndarray, int]:
    """Offsets of the contiguous stretches of a view, and their common length, in elements."""
    dims = sorted(
        ((stride, size) for size, stride in zip(view.shape, view.stride(), strict=True) if size != 1), reverse=True
    )
    if not view.numel():
        return np.zeros(0, dtype=np.int64), 0
    length = 1
    while dims and dims[-1][0] == length:
        length *= dims.pop()[1]
    starts = np.array([view.storage_offset()], dtype=np.int64)
    for stride, size in dims:
        starts = (starts[:, None] + stride * np.arange(size)).reshape(-1)
    return starts, length


def _tensors(thing: Any) -> Iterable[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, tuple | list):
        for each in thing:
            yield from _tensors(each)
    elif isinstance(thing, dict):
        yield from _tensors(tuple(thing.values()))
