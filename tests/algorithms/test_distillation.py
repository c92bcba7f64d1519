"""What a teacher prefers, against sums over whole distributions and numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.algorithms.distillation import (
    candidate_divergence,
    candidate_loss,
    distillation_loss,
    distilled_advantages,
)
from dagrl.algorithms.rows import RowReducer
from dagrl.backends.base import ResponseTokens
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
        # Of absolute differences 1, 1 and 0.5, all, 3/5 and 1/5 are still to come.
        ({"early_weight": 0.5}, [-1.5, 1.3, 0, 0.55, 0]),
        ({"early_weight": 0.5, "coef": 2.0}, [-3, 2.6, 0, 1.1, 0]),
    ],
)
def test_a_token_is_credited_with_what_the_teacher_prefers(options: dict, expected: list[float]) -> None:
    advantages, apart = distilled_advantages(TEACHER, STUDENT, MASK, AdvantageDistillationSpec(**options))
    assert advantages.values.tolist() == pytest.approx(expected)
    assert advantages.lengths.tolist() == [4, 1, 0]
    assert apart.tolist() == pytest.approx([1, -1, -0.5, 0])


@pytest.mark.parametrize("seed", range(5))
def test_early_tokens_weigh_as_in_iw_opd_of_trl(seed: int) -> None:
    """Over padded rows: 1 + gamma (1 - sum of what precedes / sum), and -l sg(w a) as the loss."""
    random = np.random.default_rng(seed)
    gap, mask = random.normal(size=(4, 9)), random.random((4, 9)) < 0.7
    size = np.abs(gap) * mask
    before = np.cumsum(size, 1) - size
    there = (1 + 0.5 * (1 - before / np.maximum(size.sum(1, keepdims=True), 1e-8))) * gap * mask
    teacher, counts = (Column(each.reshape(-1), np.arange(0, 37, 9)) for each in (gap, mask.astype(np.float32)))
    student = Column(np.zeros(36), teacher.offsets)
    found, _ = distilled_advantages(teacher, student, counts, AdvantageDistillationSpec(early_weight=0.5))
    assert found.values.tolist() == pytest.approx(there.reshape(-1).tolist(), abs=1e-6)


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


def test_the_bound_of_a_divergence_holds_on_both_sides() -> None:
    student = torch.tensor([-20.0, -1.0], dtype=torch.float64, requires_grad=True)
    rows = RowReducer(torch.tensor([0, 0]), torch.ones(2, dtype=torch.bool))
    spec = LossDistillationSpec(divergence="k1+", clamp=10.0)
    found, _ = distillation_loss(spec, student, torch.tensor([-1.0, -20.0], dtype=torch.float64), None, rows)
    assert found.tolist() == [-10, 10]
    assert torch.autograd.grad(found.sum(), student)[0].tolist() == [0, 0]


FORMS = ("forward_kl", "reverse_kl", "mixed_kl", "jsd")


def log_probs(seed: int, tokens: int, vocabulary: int) -> torch.Tensor:
    return 2 * torch.from_numpy(np.random.default_rng(seed).normal(size=(tokens, vocabulary)))


def divergence_of(student: torch.Tensor, teacher: torch.Tensor, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """`candidate_divergence` of softmax(student) and softmax(teacher) at `ids`, which are all tokens."""
    p, q = student.log_softmax(1), teacher.log_softmax(1)
    there = torch.ones_like(ids, dtype=torch.bool)
    entropy = -(p.exp() * p).sum(1)
    spec = LossDistillationSpec(**options)
    return candidate_divergence(spec, p.gather(1, ids), q.gather(1, ids), there, entropy)


def exact_divergence(p: torch.Tensor, q: torch.Tensor, form: str, alpha: float) -> torch.Tensor:
    """Of two whole distributions; both [T, V]."""
    p, q = p.softmax(1), q.softmax(1)
    mixture = (1 - alpha) * p + alpha * q

    def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (first * (first / second).log()).sum(1)

    match form:
        case "forward_kl":
            return kl(q, p)
        case "reverse_kl":
            return kl(p, q)
        case "mixed_kl":
            return (1 - alpha) * kl(q, p) + alpha * kl(p, q)
    return alpha * kl(q, mixture) + (1 - alpha) * kl(p, mixture)


@settings(deadline=None)
@given(
    vocabulary=st.integers(2, 9),
    seed=st.integers(0, 999),
    form=st.sampled_from(FORMS),
    outside=st.sampled_from(["bucket", "renormalize", "ignore", "zero"]),
    alpha=st.floats(0.05, 0.95),
)
def test_over_all_tokens_values_and_gradients_are_those_of_whole_distributions(
    vocabulary: int, seed: int, form: str, outside: str, alpha: float
) -> None:
    student, teacher = (log_probs(seed + 7 * number, 3, vocabulary) for number in range(2))
    ids = torch.from_numpy(np.random.default_rng(seed).permuted(np.tile(np.arange(vocabulary), (3, 1)), axis=1))
    ours, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    found = divergence_of(ours, teacher, ids, divergence=form, alpha=alpha, outside=outside)
    expected = exact_divergence(theirs, teacher, form, alpha)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    found.sum().backward()
    expected.sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(seed=st.integers(0, 999), k=st.integers(1, 7), form=st.sampled_from(FORMS), alpha=st.floats(0.05, 0.95))
def test_a_bucket_or_fewer_tokens_never_exceed_the_whole_divergence(seed, k, form, alpha) -> None:
    student, teacher = (log_probs(seed + 7 * number, 3, 8) for number in range(2))
    ids = teacher.topk(k, dim=1).indices
    found = divergence_of(student, teacher, ids, divergence=form, alpha=alpha)
    assert (found <= exact_divergence(student, teacher, form, alpha) + 1e-9).all()
    assert (found >= -1e-9).all()
    more = divergence_of(student, teacher, teacher.topk(k + 1, dim=1).indices, divergence=form, alpha=alpha)
    assert (found <= more + 1e-6).all()


# p = 0.5, 0.3 and q = 0.6, 0.1 at two candidates of a vocabulary of three; the rests are 0.2 and 0.3.
P, Q, REST = (0.5, 0.3), (0.6, 0.1), (0.2, 0.3)


def _kl_of(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(first, second, strict=True))


def _mean_of(first: tuple[float, ...], second: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    return tuple((1 - alpha) * a + alpha * b for a, b in zip(first, second, strict=True))


_WITH = ((*P, REST[0]), (*Q, REST[1]))
_DIVIDED = (tuple(each / 0.8 for each in P), tuple(each / 0.7 for each in Q))
_MIXED = _mean_of(*_WITH, 0.25)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # verl's forward_kl_topk: not renormalised.
        ({"divergence": "forward_kl", "outside": "ignore"}, _kl_of(Q, P)),
        # A bound of log 0.35 on both raises p = 0.3 and q = 0.1.
        (
            {"divergence": "forward_kl", "outside": "ignore", "min_logprob": math.log(0.35)},
            _kl_of((0.6, 0.35), (0.5, 0.35)),
        ),
        # Tinker: both are renormalised.
        ({"divergence": "forward_kl", "outside": "renormalize"}, _kl_of(_DIVIDED[1], _DIVIDED[0])),
        ({"divergence": "reverse_kl", "outside": "renormalize"}, _kl_of(*_DIVIDED)),
        # NeMo-RL, without and with zero_outside_topk.
        ({"divergence": "mixed_kl", "outside": "ignore"}, 0.5 * _kl_of(Q, P) + 0.5 * _kl_of(P, Q)),
        ({"divergence": "reverse_kl", "outside": "zero"}, _kl_of(P, Q) + 0.2 * (math.log(0.2) + 100)),
        (
            {"divergence": "mixed_kl", "alpha": 0.25, "outside": "zero"},
            0.75 * _kl_of(Q, P) + 0.25 * (_kl_of(P, Q) + 0.2 * (math.log(0.2) + 100)),
        ),
        # SDPO, with a tail; alpha 0 and 1 are the two divergences.
        (
            {"divergence": "jsd", "alpha": 0.25},
            0.25 * _kl_of(_WITH[1], _MIXED) + 0.75 * _kl_of(_WITH[0], _MIXED),
        ),
        ({"divergence": "jsd", "alpha": 0.0}, _kl_of(_WITH[1], _WITH[0])),
        ({"divergence": "jsd", "alpha": 1.0}, _kl_of(*_WITH)),
    ],
)
def test_divergences_at_some_tokens_are_those_of_other_frameworks(options: dict[str, Any], expected: float) -> None:
    student, teacher = (torch.tensor([[*each, rest]], dtype=torch.float64).log() for each, rest in ((P, 0.2), (Q, 0.3)))
    found = divergence_of(student, teacher, torch.tensor([[0, 1]]), **options)
    assert found.item() == pytest.approx(expected, rel=1e-9)


def tokens_with(candidates: torch.Tensor, **columns: torch.Tensor) -> ResponseTokens:
    """Two rows of a token and of two, in the loss alike."""
    row = torch.tensor([0, 1, 1])
    return ResponseTokens(torch.full((3,), -1.0), None, torch.ones(3), columns, row, (), candidates)


@pytest.mark.parametrize("outside", ["bucket", "renormalize", "ignore"])
@pytest.mark.parametrize("form", FORMS)
def test_missing_candidates_and_rows_without_a_teacher_have_no_part(form: str, outside: str) -> None:
    """A server gave fewer than k candidates at a place, and no teacher has read the first row."""
    student = torch.tensor([[-1.0, -2, -3], [-0.7, -2, -torch.inf], [-0.7, -2, -3]]).double().requires_grad_()
    teacher = torch.tensor([[math.nan] * 3, [-1.0, -1.5, -torch.inf], [-1.0, -1.5, -torch.inf]]).double()
    tokens = tokens_with(student, teacher_topk_logprob=teacher, teacher_mask=torch.tensor([0.0, 1.0]))
    spec = LossDistillationSpec(divergence=form, outside=outside)
    found, known = candidate_loss(spec, tokens, RowReducer(tokens.row, torch.ones(3, dtype=torch.bool)))
    assert known.tolist() == [False, True, True]
    there = torch.ones(1, 2, dtype=torch.bool)
    expected = candidate_divergence(spec, student[1:2, :2], teacher[1:2, :2], there)
    torch.testing.assert_close(found, torch.cat([torch.zeros(1), expected, expected]).double())
    found.sum().backward()
    assert student.grad is not None and student.grad.isfinite().all()
    assert (student.grad[0] == 0).all() and (student.grad[1:, 2] == 0).all() and (student.grad[1:, :2] != 0).all()


@pytest.mark.parametrize("outside", ["bucket", "renormalize", "ignore"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("broken", "student", "teacher"),
    [
        ("a teacher's weights", [-1.0, -2], [math.nan, math.nan]),
        ("one number of a teacher", [-1.0, -2], [-1.0, math.nan]),
        ("one number beside a missing candidate", [-1.0, -math.inf], [math.nan, -math.inf]),
        ("a row that the teacher has not read", [-math.inf, -math.inf], [math.nan, math.nan]),
        ("a student's weights", [math.nan, -2.0], [-1.0, -2]),
        ("a teacher above certainty", [-1.0, -2], [math.inf, -2]),
    ],
)
def test_numbers_that_are_none_are_no_missing_candidates(
    form: str, outside: str, broken: str, student: list[float], teacher: list[float]
) -> None:
    given = torch.tensor([[-1.0, -2], [-1, -2], student]).double().requires_grad_()
    of_teacher = torch.tensor([[math.nan] * 2, [-1.0, -2], teacher]).double()
    row = torch.tensor([0, 1, 2])
    columns = {"teacher_topk_logprob": of_teacher, "teacher_mask": torch.tensor([0.0, 1, 1])}
    tokens = ResponseTokens(torch.full((3,), -1.0), None, torch.ones(3), columns, row, (), given)
    spec = LossDistillationSpec(divergence=form, outside=outside)
    found, known = candidate_loss(spec, tokens, RowReducer(row, torch.ones(3, dtype=torch.bool)))
    assert known.tolist() == [False, True, True]
    assert found[:2].isfinite().all() and not found[2].isfinite(), broken


@pytest.mark.parametrize("clamp", [None, 0.5])
@pytest.mark.parametrize("form", ["k2", "k3", "abs", "k1+", *FORMS])
def test_a_divergence_that_is_no_number_has_no_finite_gradient(form: str, clamp: float | None) -> None:
    """The engine refuses a step by its gradient, not by its loss."""
    spec = LossDistillationSpec(divergence=form, clamp=clamp)
    row, active, taught = torch.tensor([0, 1, 2]), torch.ones(3, dtype=torch.bool), torch.tensor([0.0, 1, 1])
    teacher = torch.tensor([math.nan, -2.0, math.nan]).double()
    student = torch.tensor([-1.0, -1.5, -1.0]).double().requires_grad_()
    if spec.over_candidates:
        columns = {"teacher_topk_logprob": teacher[:, None], "teacher_mask": taught}
        tokens = ResponseTokens(torch.full((3,), -1.0), None, torch.ones(3), columns, row, (), student[:, None])
        found, _ = candidate_loss(spec, tokens, RowReducer(row, active))
    else:
        found, _ = distillation_loss(spec, student, teacher, taught, RowReducer(row, active))
    found.sum().backward()
    assert student.grad is not None
    assert found.isfinite().tolist() == student.grad.isfinite().tolist() == [True, True, False]
