"""Columns as Arrow tables and parquet files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.data.batch import Column
from dagrl.data.tables import columns_of, table_of, write_tables

SHARED = Column(np.arange(24, dtype=np.uint8).reshape(8, 3), np.array([0, 5, 5, 8]), np.array([0, 0, 1, 2]))
COLUMNS = {
    "flat": Column(np.array([1.5, 2.5, np.nan, -0.0], np.float32)),
    "ints": Column(np.arange(4)),
    "arrays": Column(np.arange(24, dtype=np.int16).reshape(4, 2, 3)),
    "tokens": Column.ragged([[1, 2], [], [3], [4, 5, 6]], "int64"),
    "masks": Column.ragged([[0.5], [1.0, 0.0], [], []], "float32"),
    "routes": Column(np.arange(36, dtype=np.int16).reshape(6, 2, 3), np.array([0, 1, 1, 4, 6])),
    "candidates": Column(
        np.array([[-1, -2], [-3, -np.inf], [np.nan, np.nan], [0, -4]], np.float32), np.array([0, 1, 1, 3, 4])
    ),
    "text": Column.text(["", "ä", "b\n", "longer"]),
    "empty": Column.ragged([[], [], [], []], "int32"),
    "pixel_values": SHARED,
    "shared_text": Column.shared(Column.text(["x", "yz"]), np.array([1, 1, 0, 0])),
}


def assert_same(column: Column, other: Column) -> None:
    assert len(column) == len(other)
    assert column.values.dtype == other.values.dtype
    for row in range(len(column)):
        np.testing.assert_array_equal(column[row], other[row])


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 1], [2], [2, 2, 3], []])
def test_a_column_comes_back_from_a_file(name: str, rows: list[int], tmp_path: Path) -> None:
    column = COLUMNS[name].take(np.array(rows))
    path = tmp_path / "new" / "file.parquet"
    write_tables([table_of({name: column})], path)
    assert_same(columns_of(pq.read_table(path))[name], column)
    assert [each.name for each in path.parent.iterdir()] == ["file.parquet"]


def test_each_row_group_is_read_alone(tmp_path: Path) -> None:
    parts = [np.array([0]), np.arange(1, 4)]
    tables = [table_of({name: each.take(rows) for name, each in COLUMNS.items()}) for rows in parts]
    write_tables(tables, tmp_path / "file.parquet")
    second = columns_of(pq.ParquetFile(tmp_path / "file.parquet").read_row_group(1))
    for name in COLUMNS:
        assert_same(second[name], COLUMNS[name].take(parts[1]))


def test_a_row_that_shares_its_entry_stores_none() -> None:
    assert table_of({"pixel_values": SHARED})["pixel_values"].null_count == 1


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4), max_size=8), st.data())
def test_slices_keep_their_values(rows: list[list[int]], data: st.DataObject) -> None:
    column = Column.ragged(rows, "int32")
    begin = data.draw(st.integers(0, len(rows)))
    table = table_of({"tokens": column}).slice(begin)
    assert_same(columns_of(table)["tokens"], column.take(np.arange(begin, len(rows))))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(OSError, match=r"cannot write .*folder/x\.parquet"):
        write_tables([table_of({"ints": COLUMNS["ints"]})], tmp_path / "folder" / "x.parquet")
