"""What a teacher prefers, against sums over whole distributions and numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dagrl.algorithms.distillation import distillation_loss, distilled_advantages
from dagrl.algorithms.rows import RowReducer
from dagrl.config.schema import AdvantageDistillationSpec, LossDistillationSpec
from dagrl.data.batch import Column

MASK = Column.ragged([[1, 1, 0, 1], [1], []], "float32")
STUDENT = Column.ragged([[-1, -2, -9, -3], [-0.5], []], "float32")
TEACHER = Column.ragged([[-2, -1, math.nan, -2.5], [-0.5], []], "float32")
# Differences of the trained tokens: -1, 1, 0.5 | 0.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [-1, 1, 0, 0.5, 0]),
        ({"coef": 2.0}, [-2, 2, 0, 1, 0]),
        # Backwards: 0.5, 1 + 0.5 / 2, -1 + 1.25 / 2. A tool's token takes no step.
        ({"discount": 0.5}, [-0.375, 1.25, 0, 0.5, 0]),
        ({"discount": 1.0}, [0.5, 1.5, 0, 0.5, 0]),
        ({"clamp": 0.75}, [-0.75, 0.75, 0, 0.5, 0]),
    ],
)
def test_a_token_is_credited_with_what_the_teacher_prefers(options: dict, expected: list[float]) -> None:
    advantages, apart = distilled_advantages(TEACHER, STUDENT, MASK, AdvantageDistillationSpec(**options))
    assert advantages.values.tolist() == pytest.approx(expected)
    assert advantages.lengths.tolist() == [4, 1, 0]
    assert apart.tolist() == pytest.approx([1, -1, -0.5, 0])


def test_a_row_without_a_teacher_gets_nothing() -> None:
    teacher = Column.ragged([[math.nan] * 4, [-0.25], []], "float32")
    taught = np.array([0, 1, 1], dtype=np.float32)
    advantages, apart = distilled_advantages(teacher, STUDENT, MASK, AdvantageDistillationSpec(), taught)
    assert advantages.values.tolist() == [0, 0, 0, 0, 0.25]
    assert apart.tolist() == [-0.25]


@pytest.mark.parametrize("wrong", [math.nan, -math.inf, math.inf])
def test_a_log_prob_that_is_not_finite_is_an_error(wrong: float) -> None:
    teacher = Column.ragged([[-1, wrong, -1, -1], [-1], []], "float32")
    with pytest.raises(ValueError, match="teacher_mask"):
        distilled_advantages(teacher, STUDENT, MASK, AdvantageDistillationSpec())


def logits(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=6))


def test_the_expected_policy_gradient_is_that_of_the_divergence_from_the_teacher() -> None:
    policy, teacher = logits(1).requires_grad_(), logits(2).log_softmax(0)
    logprob = policy.log_softmax(0)
    divergence = (logprob.exp() * (logprob - teacher)).sum()
    (expected,) = torch.autograd.grad(divergence, policy, retain_graph=True)
    given = [Column(each.detach().numpy(), np.arange(7)) for each in (teacher, logprob)]
    advantages, _ = distilled_advantages(*given, Column(np.ones(6), np.arange(7)), AdvantageDistillationSpec())
    surrogate = -(logprob.exp().detach() * torch.from_numpy(advantages.values).double() * logprob).sum()
    (found,) = torch.autograd.grad(surrogate, policy)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("divergence", "values", "slopes"),
    [
        # d = log p - log p under the teacher is 1, -1, -0.5 and 0.
        ("k1+", [1, -1, -0.5, 0], [1, -1, -0.5, 0]),
        ("k2", [0.5, 0.5, 0.125, 0], [1, -1, -0.5, 0]),
        ("abs", [1, 1, 0.5, 0], [1, -1, -1, 0]),
        (
            "k3",
            [math.exp(-1), math.e - 2, math.exp(0.5) - 1.5, 0],
            [1 - math.exp(-1), 1 - math.e, 1 - math.exp(0.5), 0],
        ),
    ],
)
def test_the_divergence_of_sampled_tokens(divergence: str, values: list[float], slopes: list[float]) -> None:
    student = torch.tensor([-1.0, -2.0, -3.0, -0.5], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-2.0, -1.0, -2.5, -0.5], dtype=torch.float64)
    rows = RowReducer(torch.tensor([0, 0, 0, 1]), torch.ones(4, dtype=torch.bool))
    found, known = distillation_loss(LossDistillationSpec(divergence=divergence), student, teacher, None, rows)
    assert known.all()
    assert found.tolist() == pytest.approx(values)
    assert torch.autograd.grad(found.sum(), student)[0].tolist() == pytest.approx(slopes)


def test_only_tokens_with_a_teacher_have_a_divergence_and_a_bound_stops_the_gradient() -> None:
    student = torch.tensor([-1.0, -2.0, -3.0, -0.5], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([math.nan, math.nan, -20.0, -0.75], dtype=torch.float64)
    rows = RowReducer(torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool))
    taught, spec = torch.tensor([0.0, 1.0]), LossDistillationSpec(clamp=10.0)
    found, known = distillation_loss(spec, student, teacher, taught, rows)
    assert found.tolist() == [0, 0, 10, 0.25]
    assert known.tolist() == [False, False, True, True]
    assert torch.autograd.grad(found.sum(), student)[0].tolist() == [0, 0, 0, 0.25]
