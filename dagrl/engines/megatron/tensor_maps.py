"""How one Megatron parameter, split over tensor-parallel ranks, is made of Hugging Face tensors, and back.

Pure functions of tensors: no process groups, no models. `families` says which map joins which names, `hf_weights` moves
the tensors. For every map and any number of parts, ``join([shard(full, i, n) for i in range(n)])`` gives `full` back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


class TensorMap(Protocol):
    """One parameter's relation to the Hugging Face tensors that it holds."""

    split: bool
    """Whether tensor-parallel ranks hold parts of it; if not, each holds all."""

    def shard(self, full: Sequence[Tensor], part: int, parts: int) -> Tensor:
        """The parameter on rank `part` of `parts`, out of the full Hugging Face tensors."""
        ...

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The full Hugging Face tensors, out of all ranks' parameters (of any one rank's, if it is not split)."""
        ...

    def shard_shape(self, full: Sequence[Shape], parts: int) -> Shape:
        """Shape of `shard`, out of those of the full tensors."""
        ...


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same tensor on every rank."""

    split = False

    def shard(self, full: Sequence[Tensor], part: int, parts: int) -> Tensor:
        """The tensor itself."""
        return full[0]

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The tensor itself."""
        return [shards[0]]

    def shard_shape(self, full: Sequence[Shape], parts: int) -> Shape:
        """The tensor's own."""
        return full[0]


@dataclass(frozen=True, slots=True)
class Parallel:
    """Cut into equal parts: `dim` 0 (outputs) for column-parallel layers, 1 (inputs) for row-parallel ones."""

    dim: int
    split = True

    def shard(self, full: Sequence[Tensor], part: int, parts: int) -> Tensor:
        """One slice."""
        return _slice(full[0], self.dim, part, parts)

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """All slices."""
        return [torch.cat(list(shards), dim=self.dim)]

    def shard_shape(self, full: Sequence[Shape], parts: int) -> Shape:
        """One slice."""
        return (*full[0][: self.dim], full[0][self.dim] // parts, *full[0][self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class GateUp:
    """Gate and up projection of a gated MLP, one below the other on each rank."""

    split = True

    def shard(self, full: Sequence[Tensor], part: int, parts: int) -> Tensor:
        """The rank's rows of the gate, then its rows of the up projection."""
        return torch.cat([_slice(tensor, 0, part, parts) for tensor in full])

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Gate and up projection."""
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in (0, 1)]

    def shard_shape(self, full: Sequence[Shape], parts: int) -> Shape:
        """Both, one below the other."""
        return _stacked(full, parts)


@dataclass(frozen=True, slots=True)
class GroupedQkv:
    """Query, key and value projections (weights or biases), interleaved by query group.

    Each group's queries are followed by its one key head and its one value head, and ranks hold equal slices of the
    whole. Ranks beyond the number of groups hold parts of one: Megatron gathers the projections' results over them and
    takes from those what a rank's query heads need (`megatron.core.transformer.attention`).
    """

    groups: int
    head_dim: int
    split = True

    def shard(self, full: Sequence[Tensor], part: int, parts: int) -> Tensor:
        """The rank's groups, or its part of one."""
        by_group = [tensor.unflatten(0, (self.groups, -1)) for tensor in full]
        return _slice(torch.cat(by_group, dim=1).flatten(0, 1), 0, part, parts)

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Query, key and value."""
        by_group = torch.cat(list(shards)).unflatten(0, (self.groups, -1))
        queries = by_group.shape[1] - 2 * self.head_dim
        return [part.flatten(0, 1) for part in by_group.split((queries, self.head_dim, self.head_dim), dim=1)]

    def shard_shape(self, full: Sequence[Shape], parts: int) -> Shape:
        """All three, one below the other."""
        return _stacked(full, parts)


@dataclass(frozen=True, slots=True)
class VocabParallel:
    """Rows of the vocabulary, filled up with zeros to a multiple of the number of ranks."""

    rows: int
    padded_rows: int
    split = True

    def shard(self, full: Sequence[Tensor], part: int, parts: int) -> Tensor:
        """The rank's rows, those beyond the vocabulary being zero."""
        each = self.padded_rows // parts
        rows = full[0][part * each : (part + 1) * each]
        missing = rows.new_zeros(each - len(rows), *rows.shape[1:])
        return torch.cat([rows, missing]) if len(missing) else rows

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The vocabulary's own rows."""
        return [torch.cat(list(shards))[: self.rows]]

    def shard_shape(self, full: Sequence[Shape], parts: int) -> Shape:
        """A share of the padded rows."""
        return (self.padded_rows // parts, *full[0][1:])


def _slice(tensor: Tensor, dim: int, part: int, parts: int) -> Tensor:
    length = tensor.shape[dim] // parts
    assert length * parts == tensor.shape[dim], f"{parts} ranks cannot share {tuple(tensor.shape)} along {dim}"
    return tensor.narrow(dim, part * length, length)


def _stacked(full: Sequence[Shape], parts: int) -> Shape:
    return (sum(shape[0] for shape in full) // parts, *full[0][1:])
