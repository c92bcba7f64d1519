"""A batch: a table of named columns, also ragged ones, in flat arrays that Ray shares without copying.

Each row has an id, its position in the step's whole batch. Batches are immutable; operations return new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_LONG_ROW = 64
"""Values per row from which rows are copied as slices; shorter rows are faster to gather by value."""


@dataclass(frozen=True, slots=True)
class Column:
    """Values of one column, concatenated; with `offsets`, entry i is ``values[offsets[i] : offsets[i + 1]]``.

    If a value is an array, `values` has further axes after the first. With `index`, row i is entry ``index[i]``: rows
    share large entries, such as the images of a prompt. Without it, rows are entries.
    """

    values: np.ndarray
    offsets: np.ndarray | None = None
    index: np.ndarray | None = None

    def __post_init__(self) -> None:
        assert self.index is None or self.offsets is not None, "only ragged columns share entries"
        if self.offsets is not None:
            first, last = self.offsets[0], self.offsets[-1]
            assert first == 0 and last == len(self.values), f"offsets {first}..{last} of {len(self.values)} values"

    @staticmethod
    def ragged(rows: Sequence[np.ndarray | Sequence[float]], dtype: str) -> Column:
        """A ragged column of the given rows. If values are arrays, they have the shape of the first row's."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        values = np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)
        return Column(values, _offsets([len(array) for array in arrays]))

    @staticmethod
    def text(rows: Sequence[str]) -> Column:
        """A column of strings, stored as UTF-8."""
        return Column.ragged([np.frombuffer(row.encode(), dtype=np.uint8) for row in rows], "uint8")

    @staticmethod
    def shared(entries: Column, index: np.ndarray) -> Column:
        """A column whose row i is row ``index[i]`` of `entries`, which is ragged; the values are not copied."""
        return Column(entries.values, entries.offsets, _positions(index))

    def __len__(self) -> int:
        if self.index is not None:
            return len(self.index)
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """Row `row`: a scalar, or an array if the column is ragged."""
        if self.offsets is None:
            return self.values[row]
        entry = row if self.index is None else self.index[row]
        return self.values[self.offsets[entry] : self.offsets[entry + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Number of values in each row, int64 [rows]; 1 for a column that is not ragged."""
        if self.offsets is None:
            return np.ones(len(self), dtype=np.int64)
        lengths = np.diff(self.offsets)
        return lengths if self.index is None else lengths[self.index]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.values, self.offsets, self.index) if array is not None)

    def take(self, indices: np.ndarray) -> Column:
        """The rows at `indices`, in that order."""
        return Column.gather([self], indices)

    def strings(self) -> list[str]:
        return [self.string(row) for row in range(len(self))]

    def string(self, row: int) -> str:
        return bytes(self[row]).decode()

    @staticmethod
    def concat(parts: Sequence[Column]) -> Column:
        """The rows of all parts in order; all are ragged or none is, and there is at least one part."""
        ragged = _are_ragged(parts)
        if any(part.index is not None for part in parts):
            return _entries(parts, np.arange(sum(map(len, parts))))
        values = np.concatenate([part.values for part in parts])
        return Column(values, _offsets(np.concatenate([part.lengths for part in parts])) if ragged else None)

    @staticmethod
    def gather(parts: Sequence[Column], indices: np.ndarray) -> Column:
        """The rows that `concat` would have at `indices`, in that order."""
        indices = _positions(indices)
        if any(part.index is not None for part in parts):
            return _entries(parts, indices)
        size, rows = sum(part.values.size for part in parts), sum(map(len, parts))
        if size <= _LONG_ROW * rows:
            return _by_value(parts[0] if len(parts) == 1 else Column.concat(parts), indices)
        return _in_slices(parts, indices)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a step's batch, by id, with some of their columns."""

    rows: np.ndarray
    """Row ids, int64 [rows]."""
    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        wrong = {name: len(column) for name, column in self.columns.items() if len(column) != len(self.rows)}
        assert not wrong, f"a batch of {len(self.rows)} rows cannot hold columns of lengths {wrong}"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as tuples, which load faster than dataclass objects: a step has many small blocks."""
        columns = {name: (column.values, column.offsets, column.index) for name, column in self.columns.items()}
        return _batch_of, (self.rows, columns)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + sum(column.nbytes for column in self.columns.values())

    def select(self, names: Iterable[str]) -> Batch:
        return Batch(self.rows, {name: self.columns[name] for name in names})

    def with_columns(self, columns: Mapping[str, Column]) -> Batch:
        return Batch(self.rows, {**self.columns, **columns})

    def take(self, indices: np.ndarray) -> Batch:
        """The rows at positions `indices`, in that order."""
        indices = _positions(indices)
        return Batch(self.rows[indices], {name: column.take(indices) for name, column in self.columns.items()})

    def in_order(self, rows: np.ndarray) -> Batch:
        """The rows with these ids, in that order; every id must be present."""
        return self.take(find_rows(rows, self.rows))

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """The rows of all parts in order; all have the same columns, and there is at least one part."""
        names = parts[0].columns.keys()
        assert all(part.columns.keys() == names for part in parts), "concat: the parts have different columns"
        return Batch(
            np.concatenate([part.rows for part in parts]),
            {name: Column.concat([part[name] for part in parts]) for name in names},
        )


def find_rows(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The index of each of `rows` in `ids`, the first one of duplicates; every row must be present.

    Uses a table as long as the largest id, because ids are small.
    """
    places = np.full(max(rows.max(initial=0), ids.max(initial=0)) + 1, -1)
    # Assigned in reverse, because the last write of duplicates wins.
    places[ids[::-1]] = np.arange(len(ids))[::-1]
    indices = places[rows]
    missing = np.sort(rows[(indices < 0) | (rows < 0)])
    assert not missing.size, f"row {missing[0]} is not in the batch"
    return indices


def _batch_of(
    rows: np.ndarray, columns: Mapping[str, tuple[np.ndarray, np.ndarray | None, np.ndarray | None]]
) -> Batch:
    return Batch(rows, {name: Column(*column) for name, column in columns.items()})


def _entries(parts: Sequence[Column], indices: np.ndarray) -> Column:
    """Gather rows of columns that share entries: each needed entry of a part is copied once."""
    counts = [0 if part.offsets is None else len(part.offsets) - 1 for part in parts]
    firsts = np.cumsum([0, *counts[:-1]])
    own = [np.arange(len(part)) if part.index is None else part.index for part in parts]
    entries = np.concatenate([first + rows for first, rows in zip(firsts, own, strict=True)])
    needed, index = np.unique(entries[indices], return_inverse=True)
    gathered = Column.gather([Column(part.values, part.offsets) for part in parts], needed)
    return Column(gathered.values, gathered.offsets, index.astype(np.int64))


def _by_value(column: Column, indices: np.ndarray) -> Column:
    if column.offsets is None:
        return Column(column.values[indices])
    begins, lengths = column.offsets[:-1][indices], column.lengths[indices]
    offsets = _offsets(lengths)
    # Position of each value in the source: start of its row plus its index within the row.
    positions = np.repeat(begins - offsets[:-1], lengths)
    positions += np.arange(offsets[-1])
    return Column(column.values[positions], offsets)


def _in_slices(parts: Sequence[Column], indices: np.ndarray) -> Column:
    """Gather rows of several columns in slices, one per run of consecutive rows of a column."""
    ragged = _are_ragged(parts)
    offsets = np.concatenate([np.arange(len(part) + 1) if part.offsets is None else part.offsets for part in parts])
    part = np.repeat(np.arange(len(parts)), [len(piece) for piece in parts])[indices]
    # Each part has one more offset than rows.
    begins, ends = offsets[indices + part], offsets[indices + part + 1]
    is_first, is_last = np.ones((2, len(indices)), dtype=np.bool_)
    is_first[1:] = is_last[:-1] = (part[1:] != part[:-1]) | (begins[1:] != ends[:-1])
    slices = zip(part[is_first].tolist(), begins[is_first].tolist(), ends[is_last].tolist(), strict=True)
    # Starts with an empty slice, so that an empty result has the right dtype and shape.
    values = [parts[0].values[:0], *(parts[index].values[begin:end] for index, begin, end in slices)]
    return Column(np.concatenate(values), _offsets(ends - begins) if ragged else None)


def _are_ragged(parts: Sequence[Column]) -> bool:
    ragged = {part.offsets is not None for part in parts}
    assert len(ragged) == 1, "no parts, or ragged and flat parts mixed"
    return True in ragged


def _offsets(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Offsets of rows of these lengths, int64 [rows + 1]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(np.asarray(lengths, dtype=np.int64), out=offsets[1:])
    return offsets


def _positions(indices: np.ndarray) -> np.ndarray:
    """`indices` as int64; an empty array may have any dtype, but a mask is rejected."""
    assert indices.dtype != np.bool_, "expected positions, not a mask"
    assert indices.min(initial=0) >= 0, "negative positions are not supported"
    return indices.astype(np.int64, copy=False)


def view_of(batch: Batch) -> dict[str, Any]:
    """Columns by name: an array if a row has one value, else a list with one array or string per row."""
    view: dict[str, Any] = {}
    for name, column in batch.columns.items():
        if column.offsets is None:
            view[name] = column.values
        elif column.values.dtype == np.uint8 and column.values.ndim == 1:
            view[name] = column.strings()
        else:
            view[name] = [column[row] for row in range(len(column))]
    return view
