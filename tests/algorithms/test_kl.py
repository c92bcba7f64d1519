"""Schulman's estimators, against numbers worked out by hand and against exact divergences."""

import math

import pytest
import torch

from dagrl.algorithms.kl import k3, kl_clipped, kl_estimate

# The policy gives the token probability 1/2, the reference 1/4: d = log 2.
POLICY, REFERENCE = torch.tensor([0.5]).double().log(), torch.tensor([0.25]).double().log()


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", 0.6931471805599453),  # log 2
        ("k2", 0.2402265069591007),  # (log 2)^2 / 2 = 0.4804530139182014 / 2
        ("k3", 0.1931471805599453),  # 1/2 - 1 + log 2
        ("abs", 0.6931471805599453),
        ("k1+", 0.6931471805599453),
        ("k3+", 0.1931471805599453),
        ("abs+", 0.6931471805599453),
    ],
)
def test_estimates_of_one_token(estimator, expected):
    assert kl_estimate(POLICY, REFERENCE, estimator).item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", -0.6931471805599453), ("k3", 0.3068528194400547), ("abs", 0.6931471805599453)]
)
def test_a_token_that_the_reference_likes_better(estimator, expected):
    # d = -log 2: k1 = -log 2, k3 = 2 - 1 - log 2.
    assert kl_estimate(REFERENCE, POLICY, estimator).item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_divergence(estimator):
    policy, reference = torch.tensor([0.5, 0.25, 0.25]).double(), torch.tensor([0.25, 0.25, 0.5]).double()
    # KL = 1/2 log 2 + 1/4 log 1 + 1/4 log(1/2) = 1/4 log 2.
    mean = (policy * kl_estimate(policy.log(), reference.log(), estimator)).sum()
    assert mean.item() == pytest.approx(math.log(2) / 4, abs=1e-15)


def test_k3_keeps_tiny_differences_in_float32():
    # d = 1e-4: d^2 / 2 - d^3 / 6 + ... = 4.99983e-9, of which exp(-d) - 1 in float32 would leave nothing.
    near = kl_estimate(torch.tensor([1e-4]), torch.tensor([0.0]), "k3")
    assert near.item() == pytest.approx(4.99983e-9, rel=2e-3)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # Mean over the policy p = (3/4, 1/4) of the estimators' gradients in its first logit; q = (1/2, 1/2).
        # k1: gradient of log p averages to 0.
        ("k1", 0.0),
        # k2: that of KL(p || q) = p1 (1 - p1) (log(p1 / q1) - log(p2 / q2)) = 3/16 log 3.
        ("k2", 0.20598980412527057),
        # k3: that of KL(q || p) = p1 - q1.
        ("k3", 0.25),
    ],
)
def test_gradients_are_those_that_the_docstring_states(estimator, expected):
    logits = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64, requires_grad=True)
    logprob = logits.log_softmax(0)
    estimate = kl_estimate(logprob, torch.full((2,), 0.5, dtype=torch.float64).log(), estimator)
    (gradient,) = torch.autograd.grad((logprob.exp().detach() * estimate).sum(), logits)
    assert gradient[0].item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("estimator", ["k1+", "k3+", "abs+"])
def test_a_plus_takes_the_gradient_of_the_divergence(estimator):
    # As above: d/dlogit of KL(p || q), p = (3/4, 1/4), q = (1/2, 1/2).
    logits = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64, requires_grad=True)
    logprob = logits.log_softmax(0)
    estimate = kl_estimate(logprob, torch.full((2,), 0.5, dtype=torch.float64).log(), estimator)
    (gradient,) = torch.autograd.grad((logprob.exp().detach() * estimate).sum(), logits)
    assert gradient[0].item() == pytest.approx(0.20598980412527057, abs=1e-15)


@pytest.mark.parametrize(("estimator", "is_unbiased"), [("k1*", True), ("k2*", False), ("k3*", True)])
def test_a_star_takes_the_gradient_of_the_divergence_from_any_sampler(estimator, is_unbiased):
    # As above, but the tokens are drawn from (1/5, 4/5): the mean over them, in value and gradient.
    logits = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([0.2, 0.8], dtype=torch.float64)
    reference = torch.full((2,), 0.5, dtype=torch.float64).log()
    logprob = logits.log_softmax(0)
    value = (sampler * kl_estimate(logprob, reference, estimator, sampler.log())).sum()
    (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
    # Of k2, the mean over the policy's own tokens and its gradient, which is not that of the divergence.
    whole = (logprob.exp() * (logprob - reference) ** 2 / 2).sum()
    (expected,) = torch.autograd.grad(whole, logits)
    divergence = 0.75 * math.log(1.5) + 0.25 * math.log(0.5), 0.20598980412527057
    assert (value.item(), gradient[0].item()) == pytest.approx(
        divergence if is_unbiased else (whole.item(), expected[0].item()), abs=1e-14
    )
    assert is_unbiased or expected[0].item() != pytest.approx(divergence[1], abs=1e-3)


def of_verl(now: float, reference: float) -> tuple[float, float]:
    """``low_var_kl`` of one token and its gradient in log-prob `now`, as verl defines it.

    The gap of the log-probs is kept within 20, the estimate within 10; what is kept by force has no gradient.
    """
    gap = min(max(reference - now, -20.0), 20.0)
    estimate = math.exp(gap) - 1 - gap
    return min(estimate, 10.0), 1 - math.exp(gap) if estimate <= 10 else 0.0


GAPS = [
    -800.0,
    -88.0,
    -50.0,
    -20.5,
    -11.1,
    -10.9,
    -3.0,
    -0.5,
    -1e-3,
    0.0,
    1e-3,
    0.5,
    2.6,
    2.62,
    12.0,
    50.0,
    88.0,
    800.0,
]


@pytest.mark.parametrize("gap", GAPS)
def test_k3_is_verls_in_value_and_gradient(gap):
    now = torch.tensor([-801.0], dtype=torch.float64, requires_grad=True)
    reference = now.detach() + gap
    estimate = kl_estimate(now, reference, "k3")
    estimate.backward()
    assert (estimate.item(), now.grad.item()) == pytest.approx(of_verl(-801.0, -801.0 + gap), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("estimator", ["k1", "k3", "abs"])
def test_a_plus_keeps_the_gradient_where_the_value_has_reached_its_bound(estimator, gap):
    # The value of the estimator without the plus, the gradient of gap^2 / 2.
    now = torch.tensor([-801.0], dtype=torch.float64, requires_grad=True)
    reference = now.detach() + gap
    estimate = kl_estimate(now, reference, f"{estimator}+")
    estimate.backward()
    value = {"k1": -gap, "k3": of_verl(-801.0, -801.0 + gap)[0], "abs": abs(gap)}[estimator]
    assert (estimate.item(), now.grad.item()) == pytest.approx((value, -gap), rel=1e-9, abs=1e-12)


def test_tokens_at_the_bound_are_counted():
    # exp(2.61) - 3.61 = 9.989 and exp(2.62) - 3.62 = 10.116; exp(-10.9) + 9.9 = 9.90002 and exp(-11.1) + 10.1.
    policy = torch.tensor([-2.61, -2.62, 10.9, 11.1, 0.0, -90.0])
    assert kl_clipped(policy, torch.zeros(6)).tolist() == [False, True, False, True, False, True]


def test_the_bound_is_that_of_the_product_with_the_ratio():
    # k3(2.61 below) = 9.989 and k3(2) = 1.135; times exp(1) = 27.2 and 3.09.
    policy = torch.tensor([-2.61, 2.0])
    assert kl_clipped(policy, torch.zeros(2), "k3*", policy - 1).tolist() == [True, False]


def test_k3_without_a_bound_is_what_criteria_and_metrics_look_at():
    # exp(5) - 1 - 5
    assert k3(torch.tensor([-5.0], dtype=torch.float64)).item() == pytest.approx(142.4131591025766)
