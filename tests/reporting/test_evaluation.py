"""Intervals of evaluations."""

from __future__ import annotations

import numpy as np
import pytest

from dagrl.reporting.evaluation import interval


def test_an_interval_of_one_response_to_each_prompt_is_wilsons() -> None:
    # 2 of 10, from the table of Newcombe (1998), method 3.
    assert interval(np.array([1.0] * 2 + [0.0] * 8), is_rate=True) == pytest.approx((0.0567, 0.5098), abs=1e-4)
    assert interval(np.zeros(10), is_rate=True) == pytest.approx((0.0, 0.2775), abs=1e-4)


@pytest.mark.parametrize("responses", [1, 8])
def test_intervals_cover_the_truth_as_often_as_they_say(responses: int) -> None:
    random, hits, trials = np.random.default_rng(1), 0, 2000
    for _ in range(trials):
        # Prompts differ in difficulty: mean 0.25, as of a Beta(1, 3).
        rates = random.binomial(responses, random.beta(1, 3, size=40)) / responses
        low, high = interval(rates, is_rate=True)
        hits += low <= 0.25 <= high
    assert 0.93 < hits / trials < 0.975


def test_a_difference_on_the_same_prompts_is_narrower_than_that_of_two_groups() -> None:
    random = np.random.default_rng(2)
    first = random.beta(1, 1, size=200)
    second = np.clip(first + 0.05 + random.normal(0, 0.02, size=200), 0, 1)
    low, high = interval(second - first, is_rate=False)
    assert low < float((second - first).mean()) < high and high - low < 0.01
    assert interval(np.array([0.5]), is_rate=True) == (0.0, 1.0)
