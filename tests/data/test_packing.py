import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.data.packing import pack, pack_shared
from dagrl.data.prefix_tree import prefix_tree

LENGTHS = st.lists(st.integers(1, 50), max_size=60)


def as_array(lengths: list[int]) -> np.ndarray:
    return np.array(lengths, dtype=np.int64)


@given(LENGTHS, st.integers(50, 200))
def test_each_row_is_in_exactly_one_micro_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    parts = pack(as_array(lengths), budget)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(lengths)))
    assert all(as_array(lengths)[part].sum() <= budget for part in parts)
    assert all(len(part) and np.all(np.diff(part) > 0) for part in parts)


@given(LENGTHS, st.integers(50, 200))
def test_micro_batches_are_few_and_balanced(lengths: list[int], budget: int) -> None:
    loads = [int(as_array(lengths)[part].sum()) for part in pack(as_array(lengths), budget)]
    # Two half-empty ones could be joined; a spread wider than the longest row could be evened out.
    fewest = math.ceil(sum(lengths) / budget)
    assert len(loads) <= max(fewest, 2 * fewest - 1)
    if loads:
        assert max(loads) - min(loads) <= max(lengths)
        assert loads == sorted(loads, reverse=True)


def test_rows_are_spread_by_tokens_not_by_count() -> None:
    # 12 tokens each: five rows against two.
    assert [part.tolist() for part in pack(as_array([8, 1, 1, 1, 5, 1, 7]), 13)] == [[0, 1, 2, 3, 5], [4, 6]]


def test_rows_that_fit_together_stay_together() -> None:
    assert [part.tolist() for part in pack(as_array([4, 4, 4]), 12)] == [[0, 1, 2]]


def test_no_rows_need_no_micro_batch() -> None:
    assert pack(as_array([]), 8) == []


def test_a_row_longer_than_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match="row 1 has 9 tokens, more than the 8 of a micro-batch"):
        pack(as_array([3, 9, 8]), 8)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), max_size=40), st.integers(1, 5))
def test_rows_of_a_group_stay_together_wherever_they_stand(rows: list[tuple[int, int]], at_least: int) -> None:
    lengths, groups = as_array([length for length, _ in rows]), as_array([group for _, group in rows])
    loads = {group: int(lengths[groups == group].sum()) for group in groups.tolist()}
    budget = max(loads.values(), default=1)
    parts = pack(lengths, budget, at_least, groups)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(lengths)))
    assert all(lengths[part].sum() <= budget and np.all(np.diff(part) > 0) for part in parts)
    assert len(parts) >= min(at_least, len(loads))
    holders = [set(groups[part].tolist()) for part in parts]
    assert sum(map(len, holders)) == len(loads), "a group is in two micro-batches"


def test_a_group_longer_than_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match="rows 1, 2, which belong together, have 9 tokens, more than the 8"):
        pack(as_array([3, 4, 5, 8]), 8, groups=as_array([7, 3, 3, 9]))


ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=16)


@given(ROWS, st.integers(24, 60), st.sampled_from([1, 4]), st.integers(1, 4))
def test_shared_prefixes_count_once_towards_the_budget(
    rows: list[list[int]], budget: int, alignment: int, least: int
) -> None:
    tokens = [np.array(row, dtype=np.int64) for row in rows]
    parts = pack_shared(tokens, budget, alignment=alignment, least=least)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(rows)))
    for part in parts:
        runs = prefix_tree([tokens[row] for row in part], least).lengths
        assert (-(-runs // alignment) * alignment).sum() <= budget
        assert np.all(np.diff(part) > 0)


def test_rows_with_a_prompt_stay_together_as_far_as_the_budget_allows() -> None:
    rows = [np.array([prompt] * 10 + [response] * 2) for response in range(4) for prompt in (7, 8)]
    assert [part.tolist() for part in pack_shared(rows, 18, alignment=1, least=4)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    split = pack_shared(rows, 14, alignment=1, least=4)
    assert [sorted({row % 2 for row in part.tolist()}) for part in split] == [[0], [0], [1], [1]]


def test_groups_that_must_stay_together_do_so_and_are_named_where_they_do_not_fit() -> None:
    rows = [np.array([7] * 10 + [response] * 2) for response in range(4)]
    groups = np.array([0, 1, 0, 1])
    parts = pack_shared(rows, 14, 1, groups, alignment=1, least=4)
    assert sorted(part.tolist() for part in parts) == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="rows 0, 2, which belong together, have 24 tokens, more than the 13"):
        pack_shared(rows, 13, 1, groups, alignment=1, least=4)
    with pytest.raises(ValueError, match="row 0 has 12 tokens, more than the 8 of a micro-batch"):
        pack_shared(rows, 8, alignment=1, least=4)
