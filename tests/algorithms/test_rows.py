"""Sums that run through a response, against loops over its tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dagrl.algorithms.rows import RowReducer

responses = st.lists(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), max_size=9), max_size=6)


def packed(rows: list[list[tuple[float, bool]]]) -> tuple[RowReducer, torch.Tensor]:
    """Responses of (value, whether the token is active), one after the other."""
    row = np.repeat(np.arange(len(rows)), [len(each) for each in rows]).astype(np.int64)
    tokens = [token for each in rows for token in each]
    values = torch.tensor([value for value, _ in tokens], dtype=torch.float64)
    active = torch.tensor([counts for _, counts in tokens], dtype=torch.bool)
    return RowReducer(torch.from_numpy(row), active), values


def by_loops(tokens: list[tuple[float, bool]], discount: float) -> list[float]:
    """For each token the discounted sum over it and the active tokens after it."""
    return [
        sum(value * discount**ahead for ahead, (value, counts) in enumerate(tokens[start:]) if counts)
        for start in range(len(tokens))
    ]


@given(responses, st.sampled_from([0.0, 0.3, 0.97, 1.0]))
def test_sums_over_what_follows_and_what_precedes_are_those_of_loops(rows, discount) -> None:
    reducer, values = packed(rows)
    following = [total for tokens in rows for total in by_loops(tokens, discount)]
    assert reducer.suffix_sums(values, discount).tolist() == pytest.approx(following, abs=1e-9)
    preceding = [total for tokens in rows for total in by_loops(tokens[::-1], discount)[::-1]]
    assert reducer.prefix_sums(values, discount).tolist() == pytest.approx(preceding, abs=1e-9)


def test_running_sums_of_a_response_by_hand() -> None:
    # 1, (8), 4 and 2, the second inactive; then another response.
    reducer, values = packed([[(1.0, True), (8.0, False), (4.0, True), (2.0, True)], [(16.0, True)]])
    assert reducer.prefix_sums(values).tolist() == [1, 1, 5, 7, 16]
    assert reducer.suffix_sums(values).tolist() == [7, 6, 6, 2, 16]
    assert reducer.suffix_sums(values, 0.5).tolist() == [1 + 4 / 4 + 2 / 8, 4 / 2 + 2 / 4, 4 + 2 / 2, 2, 16]


def test_a_running_sum_takes_nothing_from_other_responses_or_inactive_tokens() -> None:
    rows = [[(1.0, True), (math.nan, False)], [(math.nan, True), (2.0, True)], [(math.inf, True)], [(3.0, True)]]
    reducer, values = packed(rows)
    following = reducer.suffix_sums(values, 0.5).tolist()
    assert math.isnan(following[2]) and [*following[:2], *following[3:]] == [1, 0, 2, math.inf, 3]
    preceding = reducer.prefix_sums(values).tolist()
    assert all(map(math.isnan, preceding[2:4])) and [*preceding[:2], *preceding[4:]] == [1, 1, math.inf, 3]


def test_a_sum_over_a_long_response_keeps_float64() -> None:
    # 0.1 a million times over, in float32: an error of a millionth, and not of a thousandth.
    tokens = 1_000_000
    reducer = RowReducer(torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens, dtype=torch.bool))
    found = reducer.suffix_sums(torch.full((tokens,), 0.1))
    assert found.dtype == torch.float64 and found[0].item() == pytest.approx(100_000, rel=1e-7)
    discounted = reducer.suffix_sums(torch.full((tokens,), 0.1, dtype=torch.float64), 0.999)
    assert discounted[0].item() == pytest.approx(100, rel=1e-12)
