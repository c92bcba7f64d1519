"""The optimal token baseline: numbers worked out by hand, and the property that defines it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dagrl.algorithms.token_returns import optimal_token_baseline_advantages
from dagrl.data.batch import Column


def advantages(rewards: list, probabilities: list, squares: list, mask: list, groups: list) -> list[list[float]]:
    columns = [Column.ragged(each, "float64") for each in (rewards, squares)]
    logprob = Column.ragged([np.log(row) for row in probabilities], "float64")
    found = optimal_token_baseline_advantages(
        columns[0], np.array(groups), Column.ragged(mask, "float32"), logprob=logprob, square_sums=columns[1]
    )
    return [found[row].tolist() for row in range(len(found))]


def approx(rows: list) -> list:
    return [pytest.approx(row, abs=1e-6) for row in rows]


def test_each_token_has_a_baseline():
    # w = 1 - 2 p + Pi. Response a: 1 - 0.5 + 0.25 = 0.75, then 1 - 1 + 0.5 = 0.5, so W is 0.75, 1.25; return 1.
    # Response b: 1 - 1.5 + 0.75 = 0.25, then 1 - 0.5 + 0.25 = 0.75: W is 0.25, 1; return 0.
    # Baselines 0.75 / 1 and 1.25 / 2.25 = 5/9. The third token of b is alone: its baseline is 0.
    found = advantages(
        [[0, 1], [0, 0, 0]],
        [[0.25, 0.5], [0.75, 0.25, 0.5]],
        [[0.25, 0.5], [0.75, 0.25, 0.5]],
        [[1, 1], [1, 1, 1]],
        [7, 7],
    )
    assert found == approx([[0.25, 4 / 9], [-0.75, -5 / 9, 0.0]])


def test_a_response_that_is_alone_has_its_return():
    assert advantages([[0, 2]], [[0.5, 0.5]], [[0.5, 0.5]], [[1, 1]], [3]) == [[2, 2]]
    # A response without tokens of the policy is none.
    found = advantages([[0, 2], [0]], [[0.5, 0.5], [0.5]], [[0.5, 0.5], [0.5]], [[1, 1], [0]], [3, 3])
    assert found == [[2, 2], [0]]


def test_answers_of_tools_do_not_shift_the_tokens_of_the_policy():
    # The same as without the masked token, whose reward and probability must not matter.
    plain = advantages(
        [[1, 2], [0, 4]], [[0.5, 0.25], [0.25, 0.5]], [[0.5, 0.5], [0.25, 0.5]], [[1, 1], [1, 1]], [0, 0]
    )
    tool = advantages(
        [[1, 0, 2], [0, 4]],
        [[0.5, 0.9, 0.25], [0.25, 0.5]],
        [[0.5, 0.9, 0.5], [0.25, 0.5]],
        [[1, 0, 1], [1, 1]],
        [0, 0],
    )
    assert tool == approx([[plain[0][0], 0, plain[0][1]], plain[1]])


def test_rounding_of_certain_tokens_gives_no_negative_weight():
    certain = np.float32(1.0) - np.float32(1e-7)
    found = advantages([[1], [0]], [[1.0], [1.0]], [[certain], [certain]], [[1], [1]], [0, 0])
    # No token has a gradient, so that no baseline is better than another; verl's is 0.
    assert found == [[1], [0]]


def test_the_weight_is_the_squared_norm_of_the_gradient_of_the_logits():
    logits = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    logprob = logits.log_softmax(-1)
    (gradient,) = torch.autograd.grad(logprob[1], logits)
    p = logprob.exp().detach()
    assert gradient.square().sum().item() == pytest.approx((1 - 2 * p[1] + p.square().sum()).item())


@st.composite
def cases(draw):
    rows = draw(st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), max_size=5)), min_size=1, max_size=6))
    seed = draw(st.integers(0, 1000))
    return [group for group, _ in rows], [mask for _, mask in rows], seed


@given(cases())
def test_it_is_verls_formula_without_the_tokens_of_tools(case):
    groups, masks, seed = case
    random = np.random.default_rng(seed)
    rewards = [random.normal(size=len(mask)).tolist() for mask in masks]
    logits = [random.normal(size=(len(mask), 4)) for mask in masks]
    tables = [np.exp(each) / np.exp(each).sum(-1, keepdims=True) for each in logits]
    probabilities = [table[:, 0].tolist() for table in tables]
    squares = [(table**2).sum(-1).tolist() for table in tables]
    found = advantages(rewards, probabilities, squares, masks, groups)

    kept = [[place for place, counts in enumerate(mask) if counts] for mask in masks]
    to_come = [
        [sum(rewards[row][later] for later in kept[row][t:]) for t in range(len(kept[row]))] for row in range(len(kept))
    ]
    weights = [[1 - 2 * probabilities[row][at] + squares[row][at] for at in kept[row]] for row in range(len(kept))]
    passed = [[sum(each[: t + 1]) for t in range(len(each))] for each in weights]
    for row, places in enumerate(kept):
        group = [other for other in range(len(kept)) if groups[other] == groups[row] and kept[other]]
        second = sorted(len(kept[other]) for other in group)[-2] if len(group) > 1 else 0
        for t, place in enumerate(places):
            there = [other for other in group if len(kept[other]) > t]
            total = sum(to_come[other][t] * passed[other][t] for other in there)
            baseline = total / (sum(passed[other][t] for other in there) + 1e-8) if t < second else 0.0
            assert found[row][place] == pytest.approx(to_come[row][t] - baseline, abs=1e-5)
            assert not math.isnan(found[row][place])
        assert all(found[row][place] == 0 for place in range(len(masks[row])) if place not in places)
