"""Columns of a batch as an Arrow table, and back: one row for each row, with the columns' own types."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dagrl.data.batch import Column


def table_of(columns: Mapping[str, Column]) -> pa.Table:
    """The columns as a table.

    Ragged columns are lists, text is a string, and a value that is an array is a list of fixed size. A row that shares
    its entry with the previous row has null.
    """
    return pa.table({name: _array_of(column) for name, column in columns.items()})


def columns_of(table: pa.Table) -> dict[str, Column]:
    """The inverse of `table_of`, with rows in any number of chunks."""
    return {name: _column_of(table[name].combine_chunks()) for name in table.column_names}


def write_tables(tables: Sequence[pa.Table], path: Path) -> None:
    """Write tables, at least one, as row groups of a parquet file, atomically. Raises OSError, as on a full disk."""
    aside = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(aside, tables[0].schema, compression="zstd") as writer:
            for table in tables:
                writer.write_table(table)
        aside.replace(path)
    except OSError as error:
        # pyarrow rewords the system's messages.
        why = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(f"cannot write {path}: {why}") from error


def _array_of(column: Column) -> pa.Array:
    if column.offsets is None:
        return _values_of(column.values)
    if column.index is not None:
        return _shared_array(column)
    if column.values.dtype == np.uint8 and column.values.ndim == 1:
        buffers = [None, pa.py_buffer(column.offsets), pa.py_buffer(np.ascontiguousarray(column.values))]
        return pa.Array.from_buffers(pa.large_string(), len(column), buffers)
    return pa.LargeListArray.from_arrays(pa.array(column.offsets), _values_of(column.values))


def _shared_array(column: Column) -> pa.Array:
    """Null in rows with the entry of the previous row."""
    assert column.index is not None
    begins = np.diff(column.index, prepend=-1) != 0
    entries = _array_of(Column(column.values, column.offsets))
    places = np.where(begins, column.index, 0)
    return entries.take(pa.array(places, mask=~begins))


def _values_of(values: np.ndarray) -> pa.Array:
    array = pa.array(np.ascontiguousarray(values).ravel())
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def _column_of(array: Any) -> Column:
    if array.null_count:
        begins = np.asarray(pc.is_valid(array).to_numpy(zero_copy_only=False))
        return Column.shared(_column_of(array.drop_null()), np.cumsum(begins) - 1)
    if pa.types.is_large_string(array.type):
        _, offsets, text = array.buffers()
        bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
        values = np.frombuffer(text or b"", np.uint8)
    elif pa.types.is_large_list(array.type):
        bounds, values = array.offsets.to_numpy(), _numpy_of(array.values)
    else:
        return Column(_numpy_of(array))
    return Column(values[bounds[0] : bounds[-1]], bounds - bounds[0])


def _numpy_of(array: Any) -> np.ndarray:
    shape = []
    while pa.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
    return array.to_numpy(zero_copy_only=False).reshape(-1, *shape)
