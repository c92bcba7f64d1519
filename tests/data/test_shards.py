"""How a batch is cut into shards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.data.shards import shard_bounds


@given(groups=st.integers(0, 60), group_size=st.integers(1, 9), shards=st.integers(1, 12))
def test_shards_are_contiguous_whole_groups_and_even(groups: int, group_size: int, shards: int) -> None:
    bounds = shard_bounds(groups * group_size, group_size, shards)
    assert len(bounds) == shards
    rows = [row for begin, end in bounds for row in range(begin, end)]
    assert rows == list(range(groups * group_size))
    assert all(begin % group_size == end % group_size == 0 for begin, end in bounds)
    sizes = [(end - begin) // group_size for begin, end in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_bounds_of_an_example() -> None:
    assert shard_bounds(20, 4, 2) == [(0, 8), (8, 20)]


def test_rows_that_are_no_whole_groups_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="10 rows are not whole groups of 4"):
        shard_bounds(10, 4, 2)
