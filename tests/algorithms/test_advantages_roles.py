"""Baselines of roles: numbers by hand, and that batches in a row are one long batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.algorithms.advantages import rae_advantages
from dagrl.data.batch import Column


def test_each_role_is_compared_with_its_own_past():
    # a: 1 - 0, then b = 0.25: 2 - 0.25, then b = 0.75 * 0.25 + 0.25 * 2 = 0.6875. b begins at 4: -1 - 4, then 2.75.
    mask = Column.ragged([[1, 1], [1], [1, 0]], "float32")
    found, after = rae_advantages(
        np.array([1.0, -1, 2]), ["a", "b", "a"], mask, baselines={"b": 4.0, "c": 9.0}, decay=0.75
    )
    assert [found[row].tolist() for row in range(3)] == [[1, 1], [-5], [1.75, 0]]
    assert after == {"a": 0.6875, "b": 2.75, "c": 9.0}


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="a reward is nan"):
        rae_advantages(np.array([np.nan]), ["a"], Column.ragged([[1]], "float32"), baselines={}, decay=0.9)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(-3, 3)), max_size=12), st.integers(0, 12))
def test_steps_in_a_row_are_one_long_step(samples, cut):
    def run(part: list, before: dict) -> tuple[list[float], dict]:
        rewards, roles = np.array([reward for _, reward in part]), [role for role, _ in part]
        mask = Column.ragged([[1]] * len(part), "float32")
        found, after = rae_advantages(rewards, roles, mask, baselines=before, decay=0.95)
        return found.values.tolist(), after

    whole, after = run(samples, {})
    first, between = run(samples[:cut], {})
    second, last = run(samples[cut:], between)
    assert (first + second, last) == (whole, after)
