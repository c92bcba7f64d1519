"""How one Megatron parameter, split over tensor-parallel ranks, is made of Hugging Face tensors, and back.

Pure functions of tensors: no process groups, no models. `families` says which map joins which names, `hf_weights` moves
the tensors. For every map and any number of parts, `join` makes of ``[shard(full, i, n) for i in range(n)]`` `full`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]
Pieces = Iterator[tuple[Tensor, Tensor]]
"""Views of full tensors, each with the view of a rank's parameter that has the same elements."""


class TensorMap(Protocol):
    """One parameter's relation to the Hugging Face tensors that it holds."""

    split: bool
    """Whether tensor-parallel ranks hold parts of it; if not, each holds all."""

    def shard(self, full: Sequence[Tensor], part: int, parts: int) -> Tensor:
        """The parameter on rank `part` of `parts`, out of the full Hugging Face tensors."""
        ...

    def pieces(self, full: Sequence[Tensor], shards: Sequence[Tensor]) -> Pieces:
        """How the full Hugging Face tensors are put together of all ranks' parameters (any one rank's, if not split).

        Every element of `full` is in one piece.
        """
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

    def pieces(self, full: Sequence[Tensor], shards: Sequence[Tensor]) -> Pieces:
        """The tensor itself."""
        yield full[0], shards[0]

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

    def pieces(self, full: Sequence[Tensor], shards: Sequence[Tensor]) -> Pieces:
        """All slices."""
        for part, shard in enumerate(shards):
            yield _slice(full[0], self.dim, part, len(shards)), shard

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

    def pieces(self, full: Sequence[Tensor], shards: Sequence[Tensor]) -> Pieces:
        """Gate and up projection, rank by rank."""
        for part, shard in enumerate(shards):
            for tensor, half in zip(full, shard.chunk(2), strict=True):
                yield _slice(tensor, 0, part, len(shards)), half

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

    def pieces(self, full: Sequence[Tensor], shards: Sequence[Tensor]) -> Pieces:
        """Query, key and value, group by group; a rank's border may run through any of them."""
        each, row = len(shards[0]), 0
        for group in range(self.groups):
            for tensor in full:
                rows = len(tensor) // self.groups
                done = 0
                while done < rows:
                    part, start = divmod(row, each)
                    length = min(rows - done, each - start)
                    yield tensor.narrow(0, group * rows + done, length), shards[part].narrow(0, start, length)
                    done, row = done + length, row + length

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

    def pieces(self, full: Sequence[Tensor], shards: Sequence[Tensor]) -> Pieces:
        """The vocabulary's own rows."""
        for place, shard in zip(full[0].split(self.padded_rows // len(shards)), shards, strict=False):
            yield place, shard[: len(place)]

    def shard_shape(self, full: Sequence[Shape], parts: int) -> Shape:
        """A share of the padded rows."""
        return (self.padded_rows // parts, *full[0][1:])


def join(tensor_map: TensorMap, shards: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    """The full Hugging Face tensors, of these `shapes`, out of all ranks' parameters."""
    full = [shards[0].new_empty(shape) for shape in shapes]
    for place, piece in tensor_map.pieces(full, shards):
        place.copy_(piece)
    return full


def _slice(tensor: Tensor, dim: int, part: int, parts: int) -> Tensor:
    length = tensor.shape[dim] // parts
    assert length * parts == tensor.shape[dim], f"{parts} ranks cannot share {tuple(tensor.shape)} along {dim}"
    return tensor.narrow(dim, part * length, length)


def _stacked(full: Sequence[Shape], parts: int) -> Shape:
    return (sum(shape[0] for shape in full) // parts, *full[0][1:])
