"""pass@k and its kin, against every choice of k responses, one by one."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import comb
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.algorithms import at_k
from dagrl.algorithms.at_k import best_at_k, majority_at_k, pass_at_k, worst_at_k

REWARDS = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), min_size=1, max_size=7)


@st.composite
def answered(draw):
    """Rewards and answers of one prompt's responses, and a k."""
    rewards = draw(REWARDS)
    votes = draw(st.lists(st.sampled_from(["7", "8", "9", None]), min_size=len(rewards), max_size=len(rewards)))
    return rewards, votes, draw(st.integers(1, len(rewards)))


def every_majority(rewards, votes, k):
    """The mean reward of the winners, over all choices of k: written down as the paper tells it."""
    worth = {vote: mean(r for r, v in zip(rewards, votes, strict=True) if v == vote) for vote in votes}
    trials = []
    for chosen in combinations(range(len(rewards)), k):
        counts = Counter(votes[i] for i in chosen if votes[i] is not None)
        if counts:
            trials.append(mean(worth[vote] for vote, count in counts.items() if count == max(counts.values())))
        else:
            trials.append(mean(rewards[i] for i in chosen))
    return mean(trials)


def test_pass_at_k_of_the_paper():
    # 1 of 4 right: of the 6 pairs 3 hold it; 2 of 4 right: only one pair holds neither; none; all.
    right = np.array([[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=bool)
    assert pass_at_k(right, 1).tolist() == [0.25, 0.5, 0.0, 1.0]
    np.testing.assert_allclose(pass_at_k(right, 2), [3 / 6, 5 / 6, 0.0, 1.0], rtol=1e-14)
    np.testing.assert_allclose(pass_at_k(right, 4), [1.0, 1.0, 0.0, 1.0], rtol=1e-14)


@pytest.mark.parametrize("k", [1, 8, 64, 200])
def test_pass_at_k_with_many_responses_is_equation_one(k):
    n = 200
    right = np.arange(n) < np.array([[0], [1], [57], [199], [200]])
    expected = [1 - comb(n - c, k) / comb(n, k) for c in (0, 1, 57, 199, 200)]
    np.testing.assert_allclose(pass_at_k(right, k), expected, rtol=1e-12, atol=1e-12)


@given(rewards=REWARDS, data=st.data())
def test_best_and_worst_are_means_over_all_choices(rewards, data):
    k = data.draw(st.integers(1, len(rewards)))
    choices = list(combinations(rewards, k))
    assert best_at_k(np.array([rewards]), k)[0] == pytest.approx(mean(map(max, choices)), abs=1e-12)
    assert worst_at_k(np.array([rewards]), k)[0] == pytest.approx(mean(map(min, choices)), abs=1e-12)


@given(case=answered())
def test_the_majority_is_the_mean_over_all_choices(case):
    rewards, votes, k = case
    assert majority_at_k(np.array([rewards]), [votes], k)[0] == pytest.approx(
        every_majority(rewards, votes, k), abs=1e-12
    )


def test_a_majority_outvotes_a_lucky_guess_and_two_halves_share():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
    votes = [["7", "8", "8", None], ["7", "7", "8", "8"]]
    assert majority_at_k(rewards, votes, 4).tolist() == [0.0, 0.5]


def test_many_choices_are_sampled_reproducibly():
    rng = np.random.default_rng(0)
    right = rng.random((200, 16)) < 0.6
    votes = [["right" if each else f"wrong {rng.integers(3)}" for each in row] for row in right]
    found = majority_at_k(right.astype(np.float64), votes, 5)
    assert found.tolist() == majority_at_k(right.astype(np.float64), votes, 5).tolist()
    assert comb(16, 5) > at_k.MAJORITY_TRIALS
    exact = [
        every_majority(row.astype(float).tolist(), vote, 5) for row, vote in zip(right[:8], votes[:8], strict=True)
    ]
    # 256 draws of a figure between 0 and 1: a standard error of 0.03 at most.
    np.testing.assert_allclose(found[:8], exact, atol=0.13)


@pytest.mark.parametrize("k", [0, 3])
def test_k_above_the_number_of_responses_is_an_error(k):
    with pytest.raises(ValueError, match="from 2 responses"):
        best_at_k(np.zeros((1, 2)), k)
    with pytest.raises(ValueError, match="from 2 responses"):
        majority_at_k(np.zeros((1, 2)), [["a", "b"]], k)
