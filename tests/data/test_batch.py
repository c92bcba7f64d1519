"""Columns and batches against plain Python lists."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.data.batch import Batch, Column, find_rows

EMPTY = np.zeros(0, dtype=np.int64)
numbers_ = st.lists(st.integers(-1000, 1000), max_size=6)
table_ = st.lists(numbers_, max_size=12)
layouts_ = st.tuples(
    st.booleans(), st.sampled_from([(), (2,), (5, 13)]), st.sampled_from(["int64", "float32", "uint8"])
)
"""Ragged or not, the shape of a value, the dtype."""
texts_ = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=8)


def listed(column: Column) -> list:
    return [np.asarray(column[row]).tolist() for row in range(len(column))]


def positions_of(rows: list) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(rows) - 1), max_size=10) if rows else st.just([])


def batch_of(rows: list[list[int]], start: int = 0) -> Batch:
    """A batch with ids start, start + 1, ... and a column of each layout."""
    ids = np.arange(start, start + len(rows), dtype=np.int64)
    return Batch(
        ids,
        {
            "tokens": Column.ragged(rows, "int64"),
            "total": Column(np.array([sum(row) for row in rows], dtype=np.float32)),
            "text": Column.text([str(row) for row in rows]),
        },
    )


@given(table_)
def test_a_ragged_column_gives_back_its_rows(rows: list[list[int]]) -> None:
    column = Column.ragged(rows, "int32")
    assert listed(column) == rows
    assert column.lengths.tolist() == [len(row) for row in rows]
    assert column.values.dtype == np.int32
    assert column.nbytes == 4 * sum(map(len, rows)) + 8 * (len(rows) + 1)


@given(texts_)
def test_text_gives_back_its_strings(rows: list[str]) -> None:
    column = Column.text(rows)
    assert column.strings() == rows
    assert column.values.dtype == np.uint8
    assert column.lengths.tolist() == [len(row.encode()) for row in rows]


@given(table_.flatmap(lambda rows: st.tuples(st.just(rows), positions_of(rows))))
def test_take_gives_the_rows_asked_for(case: tuple[list[list[int]], list[int]]) -> None:
    rows, positions = case
    taken = batch_of(rows).take(np.array(positions, dtype=np.int64))
    assert taken.rows.tolist() == positions
    assert listed(taken["tokens"]) == [rows[position] for position in positions]
    assert listed(taken["total"]) == [sum(rows[position]) for position in positions]
    assert taken["text"].strings() == [str(rows[position]) for position in positions]


@given(st.lists(table_, min_size=1, max_size=4))
def test_concat_joins_in_order_and_keeps_dtypes(tables: list[list[list[int]]]) -> None:
    starts = np.cumsum([0, *(len(table) for table in tables)])
    joined = Batch.concat([batch_of(table, int(start)) for table, start in zip(tables, starts, strict=False)])
    rows = [row for table in tables for row in table]
    assert joined.rows.tolist() == list(range(len(rows)))
    assert listed(joined["tokens"]) == rows
    assert listed(joined["total"]) == [sum(row) for row in rows]
    assert joined["text"].strings() == [str(row) for row in rows]
    assert (joined["tokens"].values.dtype, joined["total"].values.dtype) == (np.int64, np.float32)


@given(
    layouts_,
    st.lists(st.lists(st.sampled_from([0, 1, 3, 90]), max_size=6), min_size=1, max_size=4),
    st.data(),
)
def test_gather_gives_the_rows_asked_for_out_of_all_parts(layout, tables: list[list[int]], data) -> None:
    (ragged, shape, dtype), random = layout, np.random.default_rng(0)

    def row_of(length: int) -> np.ndarray:
        return random.integers(0, 200, (length, *shape) if ragged else shape).astype(dtype)

    rows = [[row_of(length) for length in table] for table in tables]
    if ragged:
        nothing = np.zeros((0, *shape), dtype=dtype)
        parts = [Column(np.concatenate([nothing, *table]), np.cumsum([0, *map(len, table)])) for table in rows]
    else:
        parts = [Column(np.array(table, dtype=dtype).reshape(-1, *shape)) for table in rows]
    for part in parts:
        part.values.flags.writeable = False
    joined = [row for table in rows for row in table]
    runs = [*data.draw(st.lists(positions_of(joined), max_size=2)), range(len(joined))]
    wanted = [place for run in data.draw(st.permutations(runs)) for place in run]
    found = Column.gather(parts, np.array(wanted, dtype=np.int64))
    assert len(found) == len(wanted)
    assert all(np.array_equal(found[row], joined[place]) for row, place in enumerate(wanted))
    assert (found.values.dtype, found.values.shape[1:], found.offsets is not None) == (dtype, shape, ragged)
    assert found.values.flags.writeable and not any(np.shares_memory(found.values, part.values) for part in parts)


def test_long_rows_of_different_parts_are_no_neighbours_wherever_they_lie() -> None:
    rows = [np.full(90, number) for number in range(4)]
    parts = [Column.ragged(rows[:2], "int64"), Column.ragged(rows[2:], "int64")]
    # Row 0 ends where, in the other part, row 3 begins; so do row 2 and, back in the first part, row 1.
    order = [0, 3, 2, 1]
    assert listed(Column.gather(parts, np.array(order))) == [rows[place].tolist() for place in order]
    assert Column.gather(parts, EMPTY).values.dtype == np.int64


@given(table_.flatmap(lambda rows: st.tuples(st.just(rows), st.permutations(range(len(rows))), st.integers(0, 12))))
def test_in_order_finds_rows_by_id(case: tuple[list[list[int]], list[int], int]) -> None:
    rows, order, count = case
    shuffled = batch_of(rows).take(np.array(order, dtype=np.int64))
    wanted = np.arange(len(rows), dtype=np.int64)[:count]
    found = shuffled.in_order(wanted)
    assert found.rows.tolist() == wanted.tolist()
    assert listed(found["tokens"]) == rows[:count]


@pytest.mark.parametrize("wanted", [[3], [-1], [0, 1, 99]])
def test_in_order_refuses_ids_that_are_not_there(wanted: list[int]) -> None:
    with pytest.raises(AssertionError, match="not in the batch"):
        batch_of([[1], [2], [3]]).in_order(np.array(wanted))
    with pytest.raises(AssertionError, match="not in the batch"):
        batch_of([]).in_order(np.array(wanted))


def test_the_first_of_rows_with_the_same_id_is_used() -> None:
    assert find_rows(np.array([7, 2, 7]), np.array([2, 7, 7, 2])).tolist() == [1, 0, 1]


def test_an_empty_batch_is_a_batch() -> None:
    empty = batch_of([])
    for same in (empty.take(EMPTY), empty.take(np.array([])), empty.in_order(EMPTY), Batch.concat([empty, empty])):
        assert len(same) == 0
        assert same["text"].strings() == []
        assert same["tokens"].values.dtype == np.int64
        assert same["tokens"].lengths.tolist() == []
    full = batch_of([[1, 2], []])
    assert listed(Batch.concat([empty, full, empty])["tokens"]) == [[1, 2], []]
    assert full.take(EMPTY)["tokens"].offsets.tolist() == [0]


def test_values_may_be_arrays_of_a_shape_of_their_own() -> None:
    rows = [np.arange(length * 6, dtype=np.int16).reshape(length, 2, 3) for length in (2, 0, 3)]
    column = Column.ragged(rows, "int16")
    assert (column.values.shape, column.lengths.tolist()) == ((5, 2, 3), [2, 0, 3])
    taken = Column.concat([column.take(np.array([2, 0])), column.take(EMPTY), column])
    assert [taken[row].tolist() for row in range(5)] == [rows[place].tolist() for place in (2, 0, 0, 1, 2)]
    assert taken.values.dtype == np.int16


def test_select_and_with_columns_keep_the_rows() -> None:
    batch = batch_of([[1, 2], [3]], start=7)
    assert list(batch.select(["text"]).columns) == ["text"]
    wider = batch.with_columns({"reward": Column(np.array([0.5, 1.0], dtype=np.float32))})
    assert "reward" in wider and "reward" not in batch
    assert wider.rows.tolist() == [7, 8]
    assert wider.nbytes == batch.nbytes + 8


def test_a_batch_is_pickled_beside_its_arrays() -> None:
    batch, arrays = batch_of([[1, 2], []] * 1000, start=7), []
    data = pickle.dumps(batch, protocol=5, buffer_callback=arrays.append)
    assert len(data) < 1000 and len(arrays) == 1 + 2 + 1 + 2
    again = pickle.loads(data, buffers=arrays)
    assert again.rows.tolist() == batch.rows.tolist()
    assert {name: listed(column) for name, column in again.columns.items()} == {
        name: listed(column) for name, column in batch.columns.items()
    }
    assert np.shares_memory(again["tokens"].values, batch["tokens"].values)


def test_rows_and_columns_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"3 rows cannot hold columns of lengths \{'tokens': 2\}"):
        Batch(np.arange(3), {"tokens": Column.ragged([[1], [2]], "int64")})
    with pytest.raises(AssertionError, match=r"offsets 0\.\.5 of 2 values"):
        Column(np.arange(2), np.array([0, 5]))


def test_parts_that_do_not_match_are_not_joined() -> None:
    with pytest.raises(AssertionError, match="ragged and flat parts mixed"):
        Column.concat([Column(np.arange(2)), Column.ragged([[1]], "int64")])
    with pytest.raises(AssertionError, match="ragged and flat parts mixed"):
        Column.gather([Column(np.zeros((2, 500))), Column.ragged([[1]], "int64")], np.array([0]))
    with pytest.raises(AssertionError, match="different columns"):
        Batch.concat([batch_of([[1]]), batch_of([[1]]).select(["text"])])


def test_a_mask_is_not_taken_for_positions() -> None:
    with pytest.raises(AssertionError, match="not a mask"):
        batch_of([[1], [2]]).take(np.array([True, False]))


@pytest.mark.parametrize("length", [1, 100])
def test_positions_are_not_counted_from_the_end(length: int) -> None:
    with pytest.raises(AssertionError, match="negative positions"):
        batch_of([[1] * length, [2]]).take(np.array([0, -1]))


def test_rows_share_entries() -> None:
    entries = Column.ragged([[1, 2], [3], [4, 5, 6]], "uint8")
    column = Column.shared(entries, np.array([0, 0, 2, 1]))
    assert [column[row].tolist() for row in range(4)] == [[1, 2], [1, 2], [4, 5, 6], [3]]
    assert column.lengths.tolist() == [2, 2, 3, 1]
    taken = column.take(np.array([2, 0, 2, 1]))
    assert [taken[row].tolist() for row in range(4)] == [[4, 5, 6], [1, 2], [4, 5, 6], [1, 2]]
    # Each required entry is stored once.
    assert taken.values.tolist() == [1, 2, 4, 5, 6]
    joined = Column.concat([taken, Column.ragged([[7]], "uint8")])
    assert joined[4].tolist() == [7] and len(joined.values) == 6
    batch = pickle.loads(pickle.dumps(Batch(np.arange(4), {"images": taken})))
    assert batch["images"][2].tolist() == [4, 5, 6] and batch["images"].values.size == 5
