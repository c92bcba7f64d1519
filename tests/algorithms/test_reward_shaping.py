"""What is taken off rewards: the KL charge and the penalty on length, against numbers worked out by hand."""

import numpy as np
import pytest

from dagrl.algorithms.advantages import row_sums
from dagrl.algorithms.reward_shaping import cosine_rewards, kl_charges, length_rewards, overlong_penalty
from dagrl.data.batch import Column


def test_each_token_is_charged_its_divergence():
    # Policy 1/2 and 1/4 against a reference of 1/4 and 1/4: k1 = log 2 and 0. The masked token would add log 4.
    half, quarter = np.log(0.5), np.log(0.25)
    policy = Column.ragged([[half, quarter, 0.0], [], [quarter]], "float32")
    reference = Column.ragged([[quarter, quarter, quarter], [], [half]], "float32")
    mask = Column.ragged([[1, 1, 0], [], [1]], "float32")
    charges, _ = kl_charges(policy, reference, mask, coef=0.5, estimator="k1")
    # log(2) / 2, 0, masked | nothing | -log(2) / 2.
    assert charges.values.tolist() == pytest.approx([0.3465735903, 0.0, 0.0, -0.3465735903], abs=1e-7)
    assert charges.lengths.tolist() == [3, 0, 1]
    charges, clipped = kl_charges(policy, reference, mask, coef=1.0, estimator="k3")
    assert not clipped.any()
    # k3 of the tokens: 1/2 - 1 + log 2 = 0.1931472 and 0; last 2 - 1 - log 2 = 0.3068528.
    assert row_sums(charges).tolist() == pytest.approx([0.1931471806, 0.0, 0.3068528194], abs=1e-7)


def test_a_token_outside_the_mask_cannot_spoil_the_charge():
    one = Column.ragged([[-1e4, -1.0, np.nan]], "float32")
    other = Column.ragged([[0.0, -1.0, -np.inf]], "float32")
    mask = Column.ragged([[0, 1, 0]], "float32")
    charges, clipped = kl_charges(one, other, mask, coef=1.0, estimator="k3")
    assert (charges.values.tolist(), clipped.tolist()) == ([0.0, 0.0, 0.0], [False] * 3)


@pytest.mark.parametrize(
    ("estimator", "charges", "clipped"),
    [
        # Log-probs 90 apart: by k3 no more than its bound, 10, either way.
        ("k1", [-90.0, 90.0], [False, False]),
        ("k2", [4050.0, 4050.0], [False, False]),
        ("k3", [10.0, 10.0], [True, True]),
        ("abs", [90.0, 90.0], [False, False]),
    ],
)
def test_a_token_far_from_the_reference_is_charged_within_the_estimators_bound(estimator, charges, clipped):
    policy, reference = Column.ragged([[-90.0, 0.0]], "float32"), Column.ragged([[0.0, -90.0]], "float32")
    mask = Column.ragged([[1, 1]], "float32")
    found, at_bound = kl_charges(policy, reference, mask, coef=0.5, estimator=estimator)
    assert found.values.tolist() == [each / 2 for each in charges]
    assert at_bound.tolist() == clipped


@pytest.mark.parametrize(("logprob", "estimator"), [(np.nan, "k3"), (-np.inf, "k1"), (np.nan, "k1"), (-np.inf, "k2")])
def test_a_charge_that_is_no_number_ends_with_a_sentence(logprob, estimator):
    policy, reference = Column.ragged([[-1.0, -1.0]], "float32"), Column.ragged([[-1.0, logprob]], "float32")
    with pytest.raises(ValueError, match=r"a token's divergence .* -1 under the policy and (nan|-inf) under the ref"):
        kl_charges(policy, reference, Column.ragged([[1, 1]], "float32"), coef=1.0, estimator=estimator)


def test_the_penalty_on_length_falls_in_the_buffer():
    # Longest 20, the last 4 are the buffer: free up to 16, then a quarter a token, all of it at 20 and beyond.
    lengths = np.array([0, 16, 17, 18, 20, 25])
    penalty = overlong_penalty(lengths, longest=20, buffer=4, factor=1.0)
    assert penalty.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, longest=20, buffer=4, factor=0.5).tolist() == [0.0, 0.0, -0.125, -0.25, -0.5, -0.5]


def test_shorter_responses_of_a_group_get_more():
    # Lengths 10 to 30: 1/2, 0.5 - 5/20, 0.5 - 15/20, -1/2. Wrong ones never get more than 0. Groups are apart, and one
    # whose responses are equally long gets nothing.
    lengths, groups = np.array([10, 7, 15, 25, 7, 30]), np.array([4, 2, 4, 4, 2, 4])
    everyone = np.ones(6, dtype=bool)
    assert length_rewards(everyone, lengths, groups).tolist() == [0.5, 0.0, 0.25, -0.25, 0.0, -0.5]
    right = np.array([False, False, False, False, True, True])
    assert length_rewards(right, lengths, groups).tolist() == [0.0, 0.0, 0.0, -0.25, 0.0, -0.5]
    assert length_rewards(everyone[:2], np.array([8, 7]), np.zeros(2)).tolist() == [-0.5, 0.5]
    assert length_rewards(everyone[:0], lengths[:0], groups[:0]).tolist() == []


@pytest.mark.parametrize(
    ("length", "right", "wrong"),
    [
        # cos(0) = 1, cos(pi/3) = 1/2, cos(pi/2) = 0, cos(2 pi/3) = -1/2: 1, 3/4, 1/2 and 1/4 of the way from the end.
        (0, 2.0, -10.0),
        (40, 1.75, -7.5),
        (60, 1.5, -5.0),
        (80, 1.25, -2.5),
        (120, -11.0, -11.0),
        (121, -11.0, -11.0),
    ],
)
def test_the_cosine_reward_goes_from_the_shortest_to_the_longest(length, right, wrong):
    rewards = cosine_rewards(
        np.array([True, False]),
        np.array([length, length]),
        longest=120,
        right_from_to=(2.0, 1.0),
        wrong_from_to=(-10.0, 0.0),
        exceeded=-11.0,
    )
    assert rewards.tolist() == pytest.approx([right, wrong], abs=1e-12)
