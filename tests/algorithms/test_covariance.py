"""Which tokens would cost entropy, against numbers worked out by hand and against the entropy itself."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.algorithms.covariance import below_quantile, beyond_moment, covariances, drawn, highest, squared_log_ratios
from dagrl.data.batch import Column


def column(values: list[float]) -> Column:
    return Column(np.array(values, dtype=np.float32), np.array([0, 2, 5]))


MASK = column([1, 1, 1, 0, 1])


def test_each_token_has_its_part_in_the_covariance():
    # Of the four that count: mean log-prob -2.5, mean advantage 0.5.
    parts = covariances(column([-1, -2, -3, -9, -4]), column([2, 0, -2, 50, 2]), MASK)
    assert parts.tolist() == [1.5 * 1.5, 0.5 * -0.5, -0.5 * -2.5, 0.0, -1.5 * 1.5]


def test_nothing_to_train_on_has_no_part():
    nothing = column([0] * 5)
    assert covariances(column([-1] * 5), column([2] * 5), nothing).tolist() == [0] * 5
    assert not highest(np.zeros(5), nothing, 1.0).any()
    assert not drawn(np.full(5, 2.0), nothing, 1.0, lower=1, upper=5, random=np.random.default_rng(0)).any()


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.1, [1, 0, 0, 0, 0]), (0.5, [1, 0, 1, 0, 0]), (0.74, [1, 0, 1, 0, 0]), (1, [1, 1, 1, 0, 1])],
)
def test_the_highest_parts_are_taken(share, expected):
    # The token outside of the mask would be the first.
    parts = np.array([2.25, -0.25, 1.25, 99.0, -2.25])
    assert highest(parts, MASK, share).tolist() == [bool(each) for each in expected]


def test_tokens_between_the_bounds_are_drawn():
    parts = np.array([1.5, 0.5, 4.0, 2.0, 6.0])
    seen = set()
    for seed in range(40):
        chosen = drawn(parts, MASK, 0.1, lower=1, upper=5, random=np.random.default_rng(seed))
        (place,) = np.flatnonzero(chosen)
        seen.add(int(place))
    assert seen == {0, 2}
    # A share of the four that count, not of all five.
    assert drawn(parts, MASK, 0.4, lower=1, upper=5, random=np.random.default_rng(0)).sum() == 1
    everyone = drawn(parts, MASK, 1.0, lower=1, upper=5, random=np.random.default_rng(0))
    assert everyone.tolist() == [True, False, True, False, False]
    assert not drawn(parts, MASK, 1.0, lower=7, upper=9, random=np.random.default_rng(0)).any()


@pytest.mark.parametrize(
    ("bound", "marks"),
    [
        # Squares 0.01, 0.04 and 0.25 of tokens that moved with their advantage; running means 0.01, 0.025 and 0.1.
        (0.1001, [0, 0, 0, 0, 0]),
        (0.0999, [0, 0, 0, 0, 1]),
        (0.0251, [0, 0, 0, 0, 1]),
        (0.0249, [1, 0, 0, 0, 1]),
        (0.001, [1, 0, 1, 0, 1]),
    ],
)
def test_tokens_are_marked_until_the_mean_square_of_the_others_is_small(bound, marks):
    # The second has moved against its advantage, the fourth is outside the mask.
    squares = squared_log_ratios(column([-1.2, -1, -0.9, -9, -0.5]), column([-1] * 5), column([-2, -1, 1, -5, 3]), MASK)
    assert squares.tolist() == pytest.approx([0.04, 0, 0.01, 0, 0.25], rel=1e-5)
    assert beyond_moment(squares, bound).tolist() == marks


def test_a_mean_at_the_bound_is_small_enough():
    assert beyond_moment(np.array([0.25, 0.75]), 0.5).tolist() == [False, False]


def test_a_token_whose_sampled_log_prob_is_unknown_is_marked_or_left_alone():
    sampled = column([math.nan, -math.inf, -math.inf, -1, -1])
    squares = squared_log_ratios(column([-1] * 5), sampled, column([1, 1, -1, 1, 0]), MASK)
    assert squares.tolist() == [0, math.inf, 0, 0, 0]
    assert beyond_moment(squares, 0.04).tolist() == [False, True, False, False, False]
    assert not beyond_moment(np.zeros(0), 0.04).any()


@pytest.mark.parametrize(
    ("share", "marks"),
    [
        # Of 0.1, 0.5, 0.3 and 0.7 the upper half, quarter and three quarters: quantiles 0.4, 0.55 and 0.25.
        (0.5, [1, 0, 1, 0, 0]),
        (0.25, [1, 1, 1, 0, 0]),
        (0.75, [1, 0, 0, 0, 0]),
    ],
)
def test_tokens_of_low_entropy_are_marked(share, marks):
    # The fourth is outside of the mask.
    assert below_quantile(column([0.1, 0.5, 0.3, 0.0, 0.7]), MASK, share).tolist() == marks


def test_tokens_of_one_entropy_all_stay():
    assert not below_quantile(column([0.5] * 5), MASK, 0.2).any()
    assert not below_quantile(column([0.5] * 5), column([0] * 5), 0.2).any()


@settings(deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=3, max_size=3), st.lists(st.floats(-2, 2), min_size=3, max_size=3))
def test_a_step_along_the_advantages_changes_the_entropy_by_minus_the_covariance(logits, advantages):
    """Of the natural policy gradient on one softmax: logits move by step A, the entropy by -step Cov(log p, A).

    The covariance is the mean of the parts over tokens drawn from the policy, here as many of each as it is likely.
    """
    start, towards = torch.tensor(logits, dtype=torch.float64), torch.tensor(advantages, dtype=torch.float64)
    probability = start.softmax(0)
    counts = np.maximum(np.round(probability.numpy() * 4000), 1).astype(int)
    tokens = np.repeat(np.arange(3), counts)
    offsets = np.array([0, len(tokens)])
    parts = covariances(
        Column(np.log(counts / len(tokens))[tokens], offsets),
        Column(towards.numpy()[tokens], offsets),
        Column(np.ones(len(tokens)), offsets),
    )

    def entropy(logits: torch.Tensor) -> torch.Tensor:
        return -(logits.softmax(0) * logits.log_softmax(0)).sum()

    rounded = torch.from_numpy(np.log(counts / len(tokens)))
    _, change = torch.autograd.functional.jvp(entropy, rounded, towards)
    assert parts.mean() == pytest.approx(-change.item(), abs=1e-6)
