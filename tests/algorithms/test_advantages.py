"""GRPO's advantages and the KL charge, against numbers worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.algorithms.advantages import grpo_advantages, kl_charged_rewards
from dagrl.data.batch import Column


def mask_of(*lengths: int) -> Column:
    return Column.ragged([np.ones(length) for length in lengths], "float32")


def rows(column: Column) -> list[list[float]]:
    return [column[row].tolist() for row in range(len(column))]


def test_rewards_are_compared_within_their_group():
    # Rewards 1, 0, 0, 1: mean 1/2, deviations 1/2, sample variance 4 * 1/4 / 3 = 1/3, so 1/2 * sqrt(3) = 0.8660254.
    # Rewards 3, 5 of the other group: mean 4, deviations 1, sample variance 2, so 1 / sqrt(2) = 0.7071068.
    rewards, groups = np.array([1.0, 3.0, 0.0, 0.0, 5.0, 1.0]), np.array([7, 9, 7, 7, 9, 7])
    advantages = grpo_advantages(rewards, groups, mask_of(2, 1, 1, 1, 1, 1))
    a, b = 0.8660254, 0.7071068
    expected = [[a, a], [-b], [-a], [-a], [b], [a]]
    assert [pytest.approx(row, abs=1e-7) for row in expected] == rows(advantages)
    assert advantages.values.dtype == np.float32


def test_without_std_the_deviation_itself_is_the_advantage():
    # Mean of 1, 2, 6 is 3.
    advantages = grpo_advantages(np.array([1.0, 2.0, 6.0]), np.zeros(3), mask_of(1, 2, 1), normalize_by_std=False)
    assert rows(advantages) == [[-2.0], [-1.0, -1.0], [3.0]]


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_groups_without_a_difference_say_nothing(normalize_by_std):
    # 0.1 has no exact mean in binary; a group of one is constant; the last group differs by an ulp of float32.
    rewards = np.array([0.1, 0.1, 0.1, 4.0, 1.0, np.nextafter(np.float32(1), np.float32(2))])
    advantages = grpo_advantages(
        rewards, np.array([0, 0, 0, 1, 2, 2]), mask_of(1, 1, 1, 1, 1, 1), normalize_by_std=normalize_by_std
    )
    assert advantages.values.tolist() == [0.0] * 6


def test_small_rewards_are_not_taken_for_rounding():
    # Mean 2e-9, deviations 1e-9, sample std sqrt(2) 1e-9.
    advantages = grpo_advantages(np.array([1e-9, 3e-9]), np.zeros(2), mask_of(1, 1))
    assert advantages.values.tolist() == pytest.approx([-0.7071068, 0.7071068], abs=1e-7)


def test_tokens_outside_the_mask_get_no_advantage():
    mask = Column.ragged([[1, 0, 1], [], [0]], "float32")
    advantages = grpo_advantages(np.array([2.0, 0.0, 1.0]), np.zeros(3), mask, normalize_by_std=False)
    assert rows(advantages) == [[1.0, 0.0, 1.0], [], [0.0]]


def test_no_rows_give_no_advantages():
    assert len(grpo_advantages(np.zeros(0), np.zeros(0, dtype=np.int64), Column.ragged([], "float32"))) == 0


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="a reward is nan"):
        grpo_advantages(np.array([1.0, np.nan]), np.zeros(2), mask_of(1, 1))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-1000, 1000)), min_size=1, max_size=20),
    st.sampled_from([-40, -1, 3]),
    st.sampled_from([0.25, 8.0]),
)
def test_shift_and_scale_of_rewards_do_not_matter(samples, shift, scale):
    groups, rewards = np.array([group for group, _ in samples]), np.array([float(reward) for _, reward in samples])
    mask = mask_of(*[1] * len(samples))
    moved = grpo_advantages(rewards * scale + shift, groups, mask)
    assert moved.values == pytest.approx(grpo_advantages(rewards, groups, mask).values, abs=1e-6)


def test_the_charge_is_the_sum_of_token_divergences():
    # Policy 1/2 and 1/4 against a reference of 1/4 and 1/4: k1 = log 2 and 0. The masked token would add log 4.
    half, quarter = np.log(0.5), np.log(0.25)
    policy = Column.ragged([[half, quarter, 0.0], [], [quarter]], "float32")
    reference = Column.ragged([[quarter, quarter, quarter], [], [half]], "float32")
    mask = Column.ragged([[1, 1, 0], [], [1]], "float32")
    rewards = np.array([1.0, 2.0, 0.0])
    charged = kl_charged_rewards(rewards, policy, reference, mask, coef=0.5, estimator="k1")
    # 1 - log(2) / 2; untouched; 0 + log(2) / 2.
    assert charged.tolist() == pytest.approx([0.6534264097, 2.0, 0.3465735903], abs=1e-7)
    charged = kl_charged_rewards(rewards, policy, reference, mask, coef=1.0, estimator="k3")
    # k3 of the tokens: 1/2 - 1 + log 2 = 0.1931472 and 0; last 2 - 1 - log 2 = 0.3068528.
    assert charged.tolist() == pytest.approx([0.8068528194, 2.0, -0.3068528194], abs=1e-7)


def test_a_token_outside_the_mask_cannot_spoil_the_charge():
    one = Column.ragged([[-1e4, -1.0]], "float32")
    other = Column.ragged([[0.0, -1.0]], "float32")
    mask = Column.ragged([[0, 1]], "float32")
    assert kl_charged_rewards(np.array([1.0]), one, other, mask, coef=1.0, estimator="k3").tolist() == [1.0]
