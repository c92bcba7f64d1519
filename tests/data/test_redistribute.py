"""Any rows, any layouts: each row is consumed once, in balance, with its group, and comes back in order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.data.batch import Batch, Column
from dagrl.data.redistribute import RowIndex, assign

ranks_ = st.integers(1, 9)
lengths_ = st.lists(st.integers(0, 5000), max_size=60)


@given(lengths_, ranks_)
def test_each_row_goes_to_one_rank(lengths: list[int], ranks: int) -> None:
    parts = assign(np.array(lengths, dtype=np.int64), None, ranks)
    assert len(parts) == ranks
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    assert all((np.diff(part) > 0).all() for part in parts)


@given(lengths_, ranks_)
def test_no_rank_holds_more_than_the_mean_and_one_row(lengths: list[int], ranks: int) -> None:
    tokens = np.array(lengths, dtype=np.int64)
    loads = [tokens[part].sum() for part in assign(tokens, None, ranks)]
    assert max(loads) <= tokens.sum() / ranks + max(lengths, default=0)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(-3, 9)), max_size=60), ranks_)
def test_groups_stay_whole_and_balanced(rows: list[tuple[int, int]], ranks: int) -> None:
    tokens, groups = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    parts = assign(tokens, groups, ranks)
    held = [set(groups[part].tolist()) for part in parts]
    assert sum(len(names) for names in held) == len(set(groups.tolist()))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(rows)))
    largest = max((tokens[groups == name].sum() for name in set(groups.tolist())), default=0)
    assert max(tokens[part].sum() for part in parts) <= tokens.sum() / ranks + largest


@given(st.integers(0, 20), ranks_)
def test_rows_without_tokens_are_spread_evenly(rows: int, ranks: int) -> None:
    counts = [len(part) for part in assign(np.zeros(rows, dtype=np.int64), None, ranks)]
    assert max(counts) - min(counts) <= 1


def test_the_longest_rows_are_placed_first() -> None:
    # 7 | 6, then 4 beside 6, 3 beside 7, and 2 to the first of two ranks of 10.
    parts = assign(np.array([2, 7, 4, 3, 6]), None, 2)
    assert [part.tolist() for part in parts] == [[0, 1, 3], [2, 4]]


def test_ranks_stay_empty_where_groups_are_few() -> None:
    parts = assign(np.array([1, 1, 5]), np.array([4, 4, 2]), 4)
    assert [part.tolist() for part in parts] == [[2], [0, 1], [], []]


@given(lengths_, ranks_, ranks_, st.randoms(use_true_random=False))
def test_any_two_layouts_fit_together(lengths: list[int], producers: int, consumers: int, random) -> None:
    ids = random.sample(range(1000), len(lengths))
    whole = Batch(
        np.array(ids, dtype=np.int64),
        {
            "response_tokens": Column.ragged(
                [[row] * length for row, length in zip(ids, lengths, strict=True)], "int64"
            ),
            "reward": Column(np.array(ids, dtype=np.float32) / 2),
        },
    )
    tokens = np.array(lengths, dtype=np.int64)
    # A producer's layout has nothing to do with lengths: rows were dealt out by chance.
    producer_of_row = np.array([random.randrange(producers) for _ in ids], dtype=np.int64)
    blocks = [whole.take(np.flatnonzero(producer_of_row == producer)) for producer in range(producers)]

    received = []
    for positions in assign(tokens, None, consumers):
        rows = whole.rows[positions]
        needed = index_of([block.rows for block in blocks]).find(rows)
        fetched = [blocks[index] for index in needed] or [whole]
        received.append(Batch.concat(fetched).in_order(rows))
    assert sum(len(batch) for batch in received) == len(ids)
    back = Batch.concat(received).in_order(whole.rows)
    assert back["response_tokens"].values.tolist() == whole["response_tokens"].values.tolist()
    assert back["response_tokens"].lengths.tolist() == lengths
    assert back["reward"].values.tolist() == [row / 2 for row in ids]


@given(
    blocks=st.lists(st.lists(st.integers(0, 30), unique=True, max_size=8), min_size=1, max_size=6),
    data=st.data(),
)
def test_each_row_is_named_by_its_first_block(blocks: list[list[int]], data) -> None:
    everything = sorted({row for block in blocks for row in block})
    wanted = data.draw(st.permutations(everything))[: data.draw(st.integers(0, len(everything)))]
    found = index_of(blocks).find(np.array(wanted, dtype=np.int64))
    assert found.tolist() == sorted({next(n for n, block in enumerate(blocks) if row in block) for row in wanted})


def test_a_row_twice_in_one_block_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="block 1 has duplicate rows"):
        index_of([[1], [3, 3]])


@pytest.mark.parametrize("rows", [[1, 8, 9], [9, 1, 8], [8, 11], [8, 100]])
def test_a_row_that_no_worker_holds_is_an_error(rows: list[int]) -> None:
    with pytest.raises(ValueError, match="2 rows are in none of the 1 blocks, row 8 among them"):
        index_of([[1, 2, 10]]).find(np.array(rows))


def index_of(blocks: Sequence[Sequence[int] | np.ndarray]) -> RowIndex:
    index = RowIndex()
    for block in blocks:
        index.add(np.array(block, dtype=np.int64))
    return index
