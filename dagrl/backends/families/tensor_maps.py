"""Map Hugging Face tensors to one Megatron parameter, split over tensor-parallel ranks, and back.

The maps are pure functions of tensors: no process groups, no models. They call methods of tensors only, so that this
module does not import torch. For every map and any number of parts, ``join`` of ``shard(full, i, n) for i in range(n)``
is `full`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
type Pieces = Iterator[tuple[Tensor, Tensor]]
"""Views of full tensors, each with the view of a rank's parameter that has the same elements."""


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One Megatron parameter and the Hugging Face tensors in it.

    In the tensors of a part of a layer both names lack the layer's prefix, and ``{expert}`` stands for the number of
    each expert. `dagrl.backends.families.tensors.model_tensors` fills both in.
    """

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    """Shapes of the full Hugging Face tensors."""
    map: TensorMap
    buffer: bool = False
    """Whether it is a buffer without gradient, in float32 for any dtype of the parameters."""
    layer: int | None = None
    expert: int | None = None
    with_the_one_before: bool = False
    """Whether inference engines fuse it with the tensor before it while they load: both must come together."""

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a linear layer, to which an adapter can be added."""
        return len(self.shapes[0]) == 2

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.megatron


class TensorMap(Protocol):
    """The relation of one parameter to the Hugging Face tensors that it holds."""

    @property
    def split(self) -> bool:
        """Whether tensor-parallel ranks hold parts of it; if not, each holds all of it."""

    def shard(self, full: Sequence[Tensor], part: int, parts: int) -> Tensor:
        """Return the parameter of rank `part` of `parts`, made from the full Hugging Face tensors."""

    def pieces(self, full: Sequence[Tensor], shards: Sequence[Tensor]) -> Pieces:
        """Pair parts of the full Hugging Face tensors with parts of the ranks' parameters, or of one if not split."""

    def shard_shape(self, full: Sequence[Shape], parts: int) -> Shape:
        """Return the shape of `shard`, computed from the shapes of the full tensors."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same tensor on every rank."""

    split = False

    def shard(self, full: Sequence[Tensor], part: int, parts: int) -> Tensor:
        return full[0]

    def pieces(self, full: Sequence[Tensor], shards: Sequence[Tensor]) -> Pieces:
        yield full[0], shards[0]

    def shard_shape(self, full: Sequence[Shape], parts: int) -> Shape:
        return full[0]


@dataclass(frozen=True, slots=True)
class Parallel:
    """Cut into equal parts: `dim` 0 (outputs) for column-parallel layers, 1 (inputs) for row-parallel ones.

    Each rank holds its parts of several tensors, such as gate and up projection, one after the other.
    """

    dim: int
    split = True

    def shard(self, full: Sequence[Tensor], part: int, parts: int) -> Tensor:
        slices = [_slice(tensor, self.dim, part, parts) for tensor in full]
        return _concatenated(slices, self.dim) if len(slices) > 1 else slices[0]

    def pieces(self, full: Sequence[Tensor], shards: Sequence[Tensor]) -> Pieces:
        for part, shard in enumerate(shards):
            for tensor, piece in zip(full, shard.chunk(len(full), self.dim), strict=True):
                yield _slice(tensor, self.dim, part, len(shards)), piece

    def shard_shape(self, full: Sequence[Shape], parts: int) -> Shape:
        return _stacked(full, parts, self.dim)


@dataclass(frozen=True, slots=True)
class Repeated:
    """Several equal tensors, one of which the parameter holds: adapters of layers that Megatron fuses share a side."""

    one: TensorMap

    @property
    def split(self) -> bool:
        return self.one.split

    def shard(self, full: Sequence[Tensor], part: int, parts: int) -> Tensor:
        return self.one.shard(full[:1], part, parts)

    def pieces(self, full: Sequence[Tensor], shards: Sequence[Tensor]) -> Pieces:
        for tensor in full:
            yield from self.one.pieces([tensor], shards)

    def shard_shape(self, full: Sequence[Shape], parts: int) -> Shape:
        return self.one.shard_shape(full[:1], parts)


@dataclass(frozen=True, slots=True)
class GroupedQkv:
    """Query, key and value projections (weights or biases), interleaved by query group.

    Each group's queries are followed by its one key head and its one value head, and ranks hold equal slices of the
    whole, also if there are more ranks than groups.
    """

    groups: int
    head_dim: int
    gated: bool = False
    """Whether the published query projection holds a gate behind each head's query. Megatron has a group's gates behind
    its queries."""
    split = True

    def shard(self, full: Sequence[Tensor], part: int, parts: int) -> Tensor:
        by_group = [tensor.unflatten(0, (self.groups, -1)) for tensor in full]
        if self.gated:
            by_head = by_group[0].unflatten(1, (-1, 2, self.head_dim))
            by_group[0] = by_head.transpose(1, 2).flatten(1, 3)
        return _slice(_concatenated(by_group, 1).flatten(0, 1), 0, part, parts)

    def pieces(self, full: Sequence[Tensor], shards: Sequence[Tensor]) -> Pieces:
        """Query, key and value, group by group; a rank's border may run through any of them."""
        rows_of_rank, row = len(shards[0]), 0
        for group in range(self.groups):
            for tensor in full:
                rows = len(tensor) // self.groups
                for block in self._blocks(tensor.narrow(0, group * rows, rows), is_query=tensor is full[0]):
                    done = 0
                    while done < len(block):
                        part, start = divmod(row, rows_of_rank)
                        length = min(len(block) - done, rows_of_rank - start)
                        yield block.narrow(0, done, length), shards[part].narrow(0, start, length)
                        done, row = done + length, row + length

    def _blocks(self, rows: Tensor, *, is_query: bool) -> Sequence[Tensor]:
        """Return views of a group's rows of one tensor, in Megatron's order."""
        if not (self.gated and is_query):
            return [rows]
        heads = rows.split(self.head_dim)
        return [*heads[::2], *heads[1::2]]

    def shard_shape(self, full: Sequence[Shape], parts: int) -> Shape:
        return _stacked(full, parts)


@dataclass(frozen=True, slots=True)
class Sections:
    """Sections of the rows of several tensors, each split into equal parts: the projections of gated delta nets.

    Each rank holds its parts of all sections, one after the other.
    """

    rows: tuple[tuple[int, ...], ...]
    """Rows of the sections of each tensor."""
    names: tuple[str, ...]
    """Megatron's names of all sections, which are separate in its checkpoints."""
    split = True

    @property
    def sections(self) -> dict[str, int]:
        """Rows of the sections by their names."""
        return dict(zip(self.names, (count for rows in self.rows for count in rows), strict=True))

    def shard(self, full: Sequence[Tensor], part: int, parts: int) -> Tensor:
        return _concatenated([_slice(section, 0, part, parts) for section in self._sections(full)], 0)

    def pieces(self, full: Sequence[Tensor], shards: Sequence[Tensor]) -> Pieces:
        sections, parts = self._sections(full), len(shards)
        for part, shard in enumerate(shards):
            held = shard.split([len(section) // parts for section in sections])
            for section, piece in zip(sections, held, strict=True):
                yield _slice(section, 0, part, parts), piece

    def shard_shape(self, full: Sequence[Shape], parts: int) -> Shape:
        return _stacked(full, parts)

    def _sections(self, full: Sequence[Tensor]) -> list[Tensor]:
        return [section for tensor, rows in zip(full, self.rows, strict=True) for section in tensor.split(rows)]


@dataclass(frozen=True, slots=True)
class VocabParallel:
    """Rows of the vocabulary, padded with zeros to a multiple of the number of ranks."""

    rows: int
    padded_rows: int
    split = True

    def shard(self, full: Sequence[Tensor], part: int, parts: int) -> Tensor:
        size = self.padded_rows // parts
        rows = full[0][part * size : (part + 1) * size]
        missing = rows.new_zeros(size - len(rows), *rows.shape[1:])
        return _concatenated([rows, missing], 0) if len(missing) else rows

    def pieces(self, full: Sequence[Tensor], shards: Sequence[Tensor]) -> Pieces:
        for place, shard in zip(full[0].split(self.padded_rows // len(shards)), shards, strict=False):
            yield place, shard[: len(place)]

    def shard_shape(self, full: Sequence[Shape], parts: int) -> Shape:
        return (self.padded_rows // parts, *full[0][1:])


def join(tensor_map: TensorMap, shards: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    """The full Hugging Face tensors, of these `shapes`, out of all ranks' parameters."""
    full = [shards[0].new_empty(shape) for shape in shapes]
    for place, piece in tensor_map.pieces(full, shards):
        place.copy_(piece)
    return full


def _concatenated(tensors: Sequence[Tensor], dim: int) -> Tensor:
    first, lengths = tensors[0], [tensor.shape[dim] for tensor in tensors]
    joined = first.new_empty((*first.shape[:dim], sum(lengths), *first.shape[dim + 1 :]))
    for place, tensor in zip(joined.split(lengths, dim), tensors, strict=True):
        place.copy_(tensor)
    return joined


def _slice(tensor: Tensor, dim: int, part: int, parts: int) -> Tensor:
    length = tensor.shape[dim] // parts
    assert length * parts == tensor.shape[dim], f"{parts} ranks cannot share {tuple(tensor.shape)} along {dim}"
    return tensor.narrow(dim, part * length, length)


def _stacked(full: Sequence[Shape], parts: int, dim: int = 0) -> Shape:
    return (*full[0][:dim], sum(shape[dim] for shape in full) // parts, *full[0][dim + 1 :])
