import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from dagrl.backends.hf.sampling import inverse_cdf, restrict, sample_tokens, uniform_numbers
from dagrl.config.schema import SamplingSpec

PROBABILITIES = torch.tensor([[0.1, 0.4, 0.2, 0.05, 0.25]])


def restricted_to(probabilities: torch.Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> torch.Tensor:
    return restrict(probabilities, SamplingSpec(top_k=top_k, top_p=top_p, min_p=min_p, max_new_tokens=1))


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (-1, 1.0, [0, 1, 2, 3, 4]),
        (1, 1.0, [1]),
        (3, 1.0, [1, 2, 4]),
        (5, 1.0, [0, 1, 2, 3, 4]),
        (9, 1.0, [0, 1, 2, 3, 4]),
        (-1, 0.39, [1]),
        (-1, 0.41, [1, 4]),
        (-1, 0.64, [1, 4]),
        (-1, 0.66, [1, 2, 4]),
        (-1, 0.96, [0, 1, 2, 3, 4]),
        # Of the three that top-k keeps, 0.4 is 0.47 and 0.4 + 0.25 is 0.76 of their sum.
        (3, 0.46, [1]),
        (3, 0.48, [1, 4]),
        (3, 0.75, [1, 4]),
        (3, 0.78, [1, 2, 4]),
        (1, 0.01, [1]),
    ],
)
def test_top_k_then_top_p_keep_the_likeliest_tokens(top_k: int, top_p: float, kept: list[int]) -> None:
    restricted = restricted_to(PROBABILITIES, top_k, top_p)[0]
    expected = torch.zeros(5)
    expected[kept] = PROBABILITIES[0, kept]
    assert torch.equal(restricted, expected)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (-1, 1.0, 0.1, [0, 1, 2, 3, 4]),
        (-1, 1.0, 0.2, [0, 1, 2, 4]),
        (-1, 1.0, 0.49, [1, 2, 4]),
        (-1, 1.0, 0.51, [1, 4]),
        (-1, 1.0, 1.0, [1]),
        (2, 1.0, 0.1, [1, 4]),
        (-1, 0.41, 0.7, [1]),
    ],
)
def test_min_p_keeps_tokens_that_are_near_the_likeliest(top_k, top_p, min_p, kept) -> None:
    restricted = restricted_to(PROBABILITIES, top_k, top_p, min_p)[0]
    assert restricted.nonzero()[:, 0].tolist() == kept
    assert torch.equal(restricted[kept], PROBABILITIES[0, kept])


def test_each_row_has_a_likeliest_token_of_its_own() -> None:
    rows = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.5, 0.4]])
    assert (restricted_to(rows, -1, 1.0, 0.5) > 0).tolist() == [[True, False, False], [False, True, True]]


def test_top_k_keeps_the_lower_ids_of_equal_tokens() -> None:
    # Many, for small arrays are sorted stably by chance.
    kept = restricted_to(torch.full((1, 5000), 1 / 5000), 20, 1.0)[0].nonzero()[:, 0]
    assert kept.tolist() == list(range(20))


def test_likely_enough_to_the_bit_is_likely_enough() -> None:
    assert restricted_to(torch.tensor([[0.25, 0.5, 0.25]]), -1, 0.5).tolist() == [[0.0, 0.5, 0.0]]


def test_each_row_is_restricted_by_its_own_probabilities() -> None:
    rows = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7], [0.3, 0.4, 0.3]])
    assert (restricted_to(rows, -1, 0.65) > 0).tolist() == [
        [True, False, False],
        [False, False, True],
        [True, True, False],
    ]


@settings(max_examples=60, deadline=None)
@given(
    weights=arrays(np.float32, (3, 7), elements=st.floats(2**-10, 1.0, width=32)),
    top_k=st.integers(1, 8),
    top_p=st.floats(0.01, 0.99),
)
def test_top_p_keeps_the_smallest_sufficient_set(weights: np.ndarray, top_k: int, top_p: float) -> None:
    probabilities = torch.from_numpy(weights / weights.sum(axis=1, keepdims=True))
    for row, kept_row in zip(probabilities.tolist(), restricted_to(probabilities, top_k, top_p).tolist(), strict=True):
        kept = [value for value in kept_row if value > 0]
        dropped = [value for value, after in zip(row, kept_row, strict=True) if after == 0]
        best_k = sum(sorted(row, reverse=True)[:top_k])
        assert 1 <= len(kept) <= top_k
        assert min(kept) >= max(dropped, default=0.0)
        assert sum(kept) >= top_p * best_k - 1e-6
        assert sum(kept) - min(kept) < top_p * best_k + 1e-6


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.2499, 1), (0.25, 2), (0.7499, 2), (0.75, 4), (1 - 2**-53, 4)]
)
def test_a_token_is_drawn_where_the_running_sum_passes_the_uniform_number(uniform: float, token: int) -> None:
    # Sums to 2: weights need not be normalised. Tokens 0, 3 and 5 must never come, also not at the borders.
    weights = torch.tensor([[0.0, 0.5, 1.0, 0.0, 0.5, 0.0]])
    assert inverse_cdf(weights, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


@given(total=st.floats(1e-3, 1e3))
def test_the_largest_uniform_number_draws_a_token(total: float) -> None:
    weights = torch.tensor([[total / 2, total / 2, 0.0]], dtype=torch.float64)
    assert inverse_cdf(weights, torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [1]


def test_log_probs_are_those_of_the_whole_distribution_at_the_temperature() -> None:
    logits = torch.log(torch.tensor([[1.0, 9.0, 4.0]])).repeat(2, 1)
    uniforms = torch.tensor([0.0, 0.99], dtype=torch.float64)
    # Logits halved: weights 1, 3 and 2. Top-k leaves tokens 1 and 2, but does not change their log-probs.
    tokens, logprobs = sample_tokens(logits, uniforms, SamplingSpec(temperature=2.0, top_k=2, max_new_tokens=1))
    assert tokens.tolist() == [1, 2]
    assert logprobs.tolist() == pytest.approx([math.log(3 / 6), math.log(2 / 6)], abs=1e-6)


def test_temperature_zero_takes_the_likeliest_token_and_the_log_prob_of_the_raw_logits() -> None:
    logits = torch.log(torch.tensor([[1.0, 9.0, 4.0], [5.0, 2.0, 1.0]]))
    tokens, logprobs = sample_tokens(
        logits, torch.full((2,), 0.999, dtype=torch.float64), SamplingSpec(temperature=0.0, max_new_tokens=1)
    )
    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == pytest.approx([math.log(9 / 14), math.log(5 / 8)], abs=1e-6)


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (4, 1.0), (-1, 0.8), (5, 0.9)])
def test_frequencies_follow_the_distribution(top_k: int, top_p: float) -> None:
    draws = 40_000
    logits = torch.tensor([1.0, -0.5, 0.3, 2.0, -1.0, 0.9, 0.0, -3.0])
    sampling = SamplingSpec(temperature=1.3, top_k=top_k, top_p=top_p, max_new_tokens=1)
    uniforms = torch.from_numpy(uniform_numbers([17], draws)[0])
    tokens, _ = sample_tokens(logits.expand(draws, -1), uniforms, sampling)

    weights = np.exp(logits.double().numpy() / 1.3)
    order = np.argsort(-weights)
    if top_k > 0:
        weights[order[top_k:]] = 0
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= top_p * weights.sum()]] = 0
    expected = draws * weights / weights.sum()
    counts = np.bincount(tokens.numpy(), minlength=len(logits))
    possible = expected > 0
    assert not counts[~possible].any()
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    # 0.999 quantiles of chi-square with 1 to 7 degrees of freedom.
    quantiles = [10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32]
    assert chi_square < quantiles[possible.sum() - 2]


def test_a_rows_numbers_depend_on_its_seed_alone() -> None:
    together = uniform_numbers([5, 6, 5, 2**63 - 1], 4)
    assert np.array_equal(together[0], together[2])
    assert len({row.tobytes() for row in together}) == 3
    assert np.array_equal(uniform_numbers([6], 9)[0, :4], together[1])
    assert ((together >= 0) & (together < 1)).all()


def test_numbers_of_neighbouring_seeds_are_independent() -> None:
    numbers = uniform_numbers(range(400), 50)
    # Standard error of a correlation over 20,000 pairs is 0.007.
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.03
    assert abs(numbers.mean() - 0.5) < 0.01
