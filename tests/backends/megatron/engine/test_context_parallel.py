"""Each rank holds an early and a late chunk of every sequence, and the ranks hold every token once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.backends.megatron.engine.context_parallel import zigzag_index


def test_two_ranks_hold_the_outer_and_the_inner_chunks():
    # Sequences of 8 and 4 tokens in four chunks: 01 23 45 67 and 8 9 10 11.
    assert zigzag_index(np.array([8, 4]), 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_index(np.array([8, 4]), 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


def test_one_rank_holds_all_in_order():
    assert zigzag_index(np.array([3, 0, 2]), 0, 1).tolist() == [0, 1, 2, 3, 4]


@given(st.integers(1, 6), st.lists(st.integers(0, 9), max_size=8))
def test_ranks_hold_every_token_once_and_equally_many_pairs_to_attend_to(size, chunks):
    lengths = np.array(chunks, dtype=np.int64) * 2 * size
    held = [zigzag_index(lengths, rank, size) for rank in range(size)]
    assert all(index.dtype == np.int64 for index in held)
    assert sorted(np.concatenate(held).tolist()) == list(range(lengths.sum()))
    place = np.concatenate([np.arange(length) for length in [0, *lengths]])
    assert len({int((place[index] + 1).sum()) for index in held}) == 1


def test_a_sequence_that_does_not_split_evenly_is_a_bug():
    with pytest.raises(AssertionError, match="4 equal chunks"):
        zigzag_index(np.array([8, 6]), 0, 2)
