"""How a batch is cut into shards."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dagrl.data.redistribute import shard_bounds


@given(groups=st.integers(0, 60), shards=st.integers(1, 12))
def test_shards_are_contiguous_groups_and_even(groups: int, shards: int) -> None:
    bounds = shard_bounds(groups, shards)
    assert len(bounds) == shards
    assert [group for begin, end in bounds for group in range(begin, end)] == list(range(groups))
    sizes = [end - begin for begin, end in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_bounds_of_an_example() -> None:
    assert shard_bounds(5, 2) == [(0, 2), (2, 5)]
