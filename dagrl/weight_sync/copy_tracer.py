"""Traces the copies that a model's loader makes from a bucket into the model's parameters.

A model's own loader joins and slices Hugging Face's tensors, with Python work for each of them, but in the end it only
copies views. A torch dispatch mode observes it: `CopyRecorder` records the copies, so that a `Replay` can
repeat them without the loader, and `WeightComparer` compares instead of copying, to verify a model's weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dagrl.weight_sync.copies import TracedCopy, first_byte, storage_of

_DIMS_OF_EXPERTS = 3
_aten = torch.ops.aten
_CONSTANTS = {_aten.fill_.Scalar, _aten.zero_.default}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class _Writes:
    """Writes into the parameters, in elements, by storage."""

    writes: dict[int, list[tuple[np.ndarray, int, bool]]] = field(default_factory=dict)
    """Per write: the starts of its runs, their length, and whether it is a copy; else it is a fill."""

    def add(self, target: Tensor, *, copied: bool) -> None:
        self.writes.setdefault(storage_of(target), []).append((*_runs(target), copied))

    def overwritten(self) -> bool:
        """Whether any element was written after a copy to it."""
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

    _writes_through = True
    """Whether copies and fills are executed."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters = parameters
        self._memories = {name: storage_of(tensor) for name, tensor in parameters.items()}
        self._names = {memory: name for name, memory in self._memories.items()}
        self._writes = _Writes()
        self._bucket = 0
        self._read: set[int] = set()
        self.obstacle = ""
        """The reason why the operations cannot be replayed as copies; empty if they can."""

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

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
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
        if parameter is not None and (func is _aten.copy_.default or func in _CONSTANTS):
            target, copies = args[0], func is _aten.copy_.default
            self._writes.add(target, copied=copies)
            if not copies:
                self._observe_fill(target, args[1] if len(args) > 1 else 0.0)
            else:
                if storage_of(args[1]) != self._bucket:
                    self._record_obstacle(f"{parameter} is computed from the weights, not copied")
                self._observe_copy(target, args[1])
            return func(*args, **kwargs) if self._writes_through else target
        if any(memory == self._bucket or memory in self._names for _, memory in touched):
            self._record_obstacle(f"{func} changes weights")
        return func(*args, **kwargs)

    @abstractmethod
    def _observe_copy(self, target: Tensor, source: Tensor) -> None: ...

    @abstractmethod
    def _observe_fill(self, target: Tensor, value: float) -> None: ...

    def _record_obstacle(self, obstacle: str) -> None:
        self.obstacle = self.obstacle or obstacle


class CopyRecorder(_CopyTracer):
    """Runs a model's loader, and records the copies."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self._copied: list[TracedCopy] = []
        self._filled: list[tuple[Tensor, float]] = []

    def constants(self) -> list[tuple[Tensor, float]]:
        """Memory to fill before the copies, with its value: padding of experts, and fills of the loader."""
        padded = [
            tensor.detach()
            for tensor in self._parameters.values()
            if (covered := self._writes.covered(tensor)).sum() < tensor.numel() and _are_padded(tensor, covered)
        ]
        return [*((tensor, 0.0) for tensor in padded), *self._filled]

    def overwrites(self) -> bool:
        """Whether a copy was overwritten; the order would then matter, which `replay` does not keep."""
        return self._writes.overwritten()

    def pop_copies(self) -> tuple[list[TracedCopy], set[int]]:
        """The copies since the last call, and the byte offsets of all views of the bucket that were read."""
        copies = self._copied, self._read
        self._copied, self._read = [], set()
        return copies

    def _observe_copy(self, target: Tensor, source: Tensor) -> None:
        if storage_of(source) == self._bucket:
            # copy_ broadcasts the source.
            wide = source.expand(target.shape)
            where = int(wide.storage_offset()), tuple(wide.shape), tuple(wide.stride())
            self._copied.append(TracedCopy(target.detach(), source.dtype, *where))

    def _observe_fill(self, target: Tensor, value: float) -> None:
        if target.numel():
            self._filled.append((target.detach(), value))


class WeightComparer(_CopyTracer):
    """Runs a model's loader without writing, and counts the elements that differ bitwise."""

    _writes_through = False

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self._differing: dict[str, list[Tensor]] = {}

    def differing(self) -> dict[str, int]:
        counts = {name: int(torch.stack(parts).sum()) for name, parts in self._differing.items()}
        return {name: count for name, count in counts.items() if count}

    def _observe_copy(self, target: Tensor, source: Tensor) -> None:
        self._compare(target, source.to(device=target.device, dtype=target.dtype).expand(target.shape))

    def _observe_fill(self, target: Tensor, value: float) -> None:
        self._compare(target, torch.full_like(target, value))

    def _compare(self, target: Tensor, sent: Tensor) -> None:
        bits = _BITS[target.element_size()]
        differs = target.view(bits) != sent.contiguous().view(bits)
        self._differing.setdefault(self._names[storage_of(target)], []).append(differs.sum())


def _is_overwritten(writes: Sequence[tuple[np.ndarray, int, bool]]) -> bool:
    counts = [len(starts) for starts, _, _ in writes]
    begins = np.concatenate([starts for starts, _, _ in writes])
    ends = np.concatenate([starts + length for starts, length, _ in writes])
    turns, copied = np.repeat(np.arange(len(counts)), counts), np.repeat([copied for _, _, copied in writes], counts)
    order = np.argsort(begins[copied], kind="stable")
    copy_begins, copy_ends, copy_turns = (column[copied][order] for column in (begins, ends, turns))
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
    """Whether the same part of each expert was written; the rest is padding."""
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


def _tensors(values: object) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
