"""Schulman's estimators, against numbers worked out by hand and against exact divergences."""

import math

import pytest
import torch

from dagrl.algorithms.kl import kl_estimate

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
