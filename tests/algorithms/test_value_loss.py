"""The critic's loss: numbers worked out by hand, gradients by differences, and the same whatever the micro-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dagrl.algorithms.value_loss import ValueObjective, value_loss, with_explained_variance
from dagrl.backends.base import ValueTokens
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.data.tally import read_tallies


@pytest.mark.parametrize(
    ("value", "old", "target", "expected", "clipped"),
    [
        # Within the bound: (1.25 - 2)^2 / 2.
        (1.25, 1.0, 2.0, 0.28125, False),
        # It has moved by 1 towards 2, and may by 0.5: (1.5 - 2)^2 / 2, and no gradient.
        (2.0, 1.0, 2.0, 0.125, True),
        # Moved away from 2: its own error is the larger, (0 - 2)^2 / 2, and draws it back.
        (0.0, 1.0, 2.0, 2.0, False),
        # Beyond its target: (3 - 1)^2 / 2 against (0.5 - 1)^2 / 2.
        (3.0, 0.0, 1.0, 2.0, False),
        # As far off on one side as the bound is on the other: both are 0.25^2 / 2.
        (1.75, 1.0, 1.625, 0.0078125, False),
    ],
)
def test_by_hand(value, old, target, expected, clipped):
    found = torch.tensor([value], requires_grad=True)
    loss, stopped = value_loss(found, torch.tensor([old]), torch.tensor([target]), cliprange=0.5)
    assert loss.tolist() == [expected]
    assert stopped.tolist() == [clipped]
    loss.sum().backward()
    assert found.grad is not None
    assert found.grad.tolist() == [0.0 if clipped else value - target]


def test_a_bound_of_zero_is_none():
    loss, stopped = value_loss(torch.tensor([9.0]), torch.tensor([0.0]), torch.tensor([1.0]), cliprange=0.0)
    assert (loss.tolist(), stopped.tolist()) == ([32.0], [False])


def python_loss(value: float, old: float, target: float, bound: float) -> float:
    near = min(max(value, old - bound), old + bound)
    return 0.5 * max((value - target) ** 2, (near - target) ** 2)


NUMBER = st.integers(-40, 40).map(lambda number: number / 8)


@given(st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=1, max_size=8), st.sampled_from([0.2, 0.5, 1.0]))
def test_value_and_gradient_are_those_of_plain_python(rows, bound):
    value, old, target = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    # Off the corners of the clip, where there is no gradient.
    value = (value + 1e-3).requires_grad_()
    loss, _ = value_loss(value, old, target, cliprange=bound)
    loss.sum().backward()
    assert value.grad is not None
    step = 1e-6
    for index, (each, before, goal) in enumerate(zip(value.tolist(), old.tolist(), target.tolist(), strict=True)):
        assert loss[index].item() == pytest.approx(python_loss(each, before, goal, bound), abs=1e-12)
        ends = [python_loss(each + shift, before, goal, bound) for shift in (-step, step)]
        assert value.grad[index].item() == pytest.approx((ends[1] - ends[0]) / (2 * step), abs=1e-4)


MASK = Column.ragged([[1, 1], [0, 1, 1], [0]], "float32")
OLD = [0.0, 1.0, 9.0, 0.5, 0.0, 7.0]
TARGET = [1.0, 1.0, np.nan, 0.5, 2.0, np.inf]
VALUE = [1.0, 1.25, 3.0, 0.0, 0.25, 5.0]
LOSSES = [0.125, 0.03125, 0.0, 0.125, 1.53125, 0.0]
"""Of tokens that count, with a bound of 0.5: the first is clipped, (0.5 - 1)^2 / 2."""


def told(objective: ValueObjective, *micro_batches: list[int]) -> tuple[float, dict[str, Stat]]:
    """Loss and metrics of the three rows, some to each micro-batch."""
    columns = {"response_mask": MASK, "value": Column(np.float32(OLD), MASK.offsets)}
    columns["return"] = Column(np.float32(TARGET), MASK.offsets)
    batch = Batch(np.arange(3), columns)
    weights, (normalizer,) = objective.token_weights(batch)
    value = Column(np.float32(VALUE), MASK.offsets)
    losses, metrics = [], []
    for rows in micro_batches:
        places = np.array(rows)

        def taken(column: Column, places: np.ndarray = places) -> torch.Tensor:
            return torch.from_numpy(column.take(places).values)

        row = np.repeat(np.arange(len(rows)), MASK.lengths[places])
        seen = {name: taken(columns[name]) for name in objective.columns}
        tokens = ValueTokens(taken(value), taken(weights) / normalizer, seen, torch.from_numpy(row))
        loss, tallies = objective(tokens)
        losses.append(loss.item())
        metrics.append(tallies)
    return sum(losses), with_explained_variance(read_tallies(metrics))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", sum(LOSSES) / 4),
        # The third response has no token that counts.
        ("seq-mean-token-sum", sum(LOSSES) / 2),
        ("seq-mean-token-mean", ((0.125 + 0.03125) / 2 + (0.125 + 1.53125) / 2) / 2),
        ("seq-mean-token-sum-norm", sum(LOSSES) / 2 / 10),
    ],
)
@pytest.mark.parametrize("cut", [[[0, 1, 2]], [[2, 0], [1]]])
def test_the_loss_of_a_batch_is_one_number_however_it_is_cut(aggregation, expected, cut):
    objective = ValueObjective(cliprange=0.5, aggregation=aggregation, longest_response=10)
    loss, metrics = told(objective, *cut)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert metrics["critic/loss"].mean == pytest.approx(expected, rel=1e-6)
    # Of two mini-batches, the mean of both.
    assert (metrics["critic/loss"] + metrics["critic/loss"]).mean == pytest.approx(expected, rel=1e-6)
    assert metrics["critic/clip_fraction"].mean == 0.25


def test_explained_variance_is_of_the_values_before():
    _, metrics = told(ValueObjective(cliprange=0.5, aggregation="token-mean", longest_response=10), [0, 1, 2])
    returns, errors = np.array([1.0, 1.0, 0.5, 2.0]), np.array([1.0, 0.0, 0.0, 2.0])
    assert metrics["critic/explained_variance"].mean == pytest.approx(1 - errors.var() / returns.var())
    assert set(metrics) == {"critic/loss", "critic/clip_fraction", "critic/explained_variance"}


@pytest.mark.parametrize("returns", [[], [0.7, 0.7, 0.7], [0.0]])
def test_equal_returns_have_no_explained_variance(returns):
    stats = {"critic/return": Stat.of(returns), "critic/error_before": Stat.of([0.1 * number for number in returns])}
    assert with_explained_variance(stats) == {}
