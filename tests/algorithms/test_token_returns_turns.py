"""Returns of turns, by hand and by a loop as in ROLL."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.algorithms.token_returns import turn_returns
from dagrl.data.batch import Column


def returns(rewards: list, mask: list, discount: float) -> list[list[float]]:
    found = turn_returns(Column.ragged(rewards, "float64"), Column.ragged(mask, "float32"), discount=discount)
    return [found[row].tolist() for row in range(len(found))]


def test_a_turn_has_its_reward_and_the_discounted_return_of_the_next():
    # Turns of 1, 2 and 4: 4, 2 + 4/2 = 4, 1 + 4/2 = 3. The other row has one turn, and the next one none.
    found = returns([[0, 1, 9, 2, 9, 0, 4], [5], [], [7]], [[1, 1, 0, 1, 0, 1, 1], [1], [], [0]], 0.5)
    assert found == [[3, 3, 0, 4, 0, 4, 4], [5], [], [0]]


def test_no_rows_have_no_returns():
    assert returns([], [], 0.9) == []
    assert returns([[]], [[]], 0.9) == [[]]


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=7), max_size=5),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.7, 1.0]),
)
def test_it_is_rolls_backward_pass_over_runs_of_the_mask(masks, seed, gamma):
    random = np.random.default_rng(seed)
    rewards = [[float(counts) * random.normal() for counts in mask] for mask in masks]
    # ROLL has the reward of a turn on its last token.
    for row, mask in zip(rewards, masks, strict=True):
        for place in range(len(mask)):
            if place + 1 < len(mask) and mask[place + 1]:
                row[place] = 0.0
    found = returns(rewards, masks, gamma)
    for row, mask in enumerate(masks):
        expected, to_come = [0.0] * len(mask), 0.0
        for place in range(len(mask) - 1, -1, -1):
            if mask[place]:
                ends = place + 1 == len(mask) or not mask[place + 1]
                if ends:
                    to_come = rewards[row][place] + gamma * to_come
                expected[place] = to_come
        assert found[row] == pytest.approx(expected)
