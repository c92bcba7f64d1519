"""Estimators of a KL divergence from single samples, used in the loss, in the reward, or only for metrics."""

from __future__ import annotations

import torch

from dagrl.config.schema.nodes.update import KlEstimator

LARGEST_LOG = 20.0
"""Log-ratios are clamped to +-this before exp(), as in verl: exp() of a larger one may overflow."""
_LARGEST_K3 = 10.0
"""Upper bound of ``k3``. The estimate grows as exp(-d): without a bound, one token that is far likelier under the
reference dominates all others, and log-probs 89 apart overflow float32."""


def kl_estimate(
    logprob: torch.Tensor, reference: torch.Tensor, estimator: KlEstimator, old: torch.Tensor | None = None
) -> torch.Tensor:
    """Estimates of KL(policy || reference), one per token; the tokens were sampled from the policy.

    `logprob` and `reference` are the log-probs of the same tokens under both, of one shape. With d = logprob -
    reference (Schulman 2020, http://joschu.net/blog/kl-approx.html, where r = exp(-d)):

    - ``k1`` = d: unbiased, but often negative and of high variance;
    - ``k2`` = d**2 / 2: biased, never negative;
    - ``k3`` = exp(-d) - 1 + d, at most 10: unbiased below that bound, never negative (GRPO, arXiv 2402.03300, eq. 4);
    - ``abs`` = |d|: biased and never negative; it grows no faster than d (``abs`` in verl, too).

    This describes values; gradients through them differ (Tang & Munos 2025, arXiv 2506.09477): on the policy's own
    tokens the gradient of k1 is zero on average, so it has no effect as a loss; the gradient of k2 is that of KL(policy
    || reference), and the gradient of k3 that of KL(reference || policy). ``k1+``, ``k3+`` and ``abs+`` therefore have
    the named estimate's value and the gradient of k2.

    ``k1*``, ``k2*`` and ``k3*`` are those values times the ratio exp(logprob - `old`), with the gradient of both:
    `old` are the log-probs under which the tokens were sampled. The mean of r k3 over them is KL(policy || reference)
    itself, and its gradient, r d times that of the log-prob, that of the divergence (DeepSeek-V3.2, arXiv 2512.02556,
    eq. 7), also after several optimizer steps. The product is at most 10 with k3, as in slime's ``low_var_kl``.

    The bound of k3 is that of verl's ``low_var_kl``. It applies for d below -2.61 or above 11. There k3 has no
    gradient, and k3+ keeps that of k2; `kl_clipped` returns these tokens. The other estimators are unbounded, also in
    verl.
    """
    difference = logprob - reference
    if estimator.endswith("+"):
        pull = difference.square() / 2
        return _value(difference, estimator[:-1]).detach() + (pull - pull.detach())
    return _value(difference, estimator.removesuffix("*"), _ratio(logprob, estimator, old))


def kl_clipped(
    logprob: torch.Tensor, reference: torch.Tensor, estimator: KlEstimator = "k3", old: torch.Tensor | None = None
) -> torch.Tensor:
    """Tokens at which `kl_estimate` applies the bound of ``k3``, ``k3+`` or ``k3*``; bool."""
    return _k3_of_clamped(logprob - reference) * _ratio(logprob, estimator, old) > _LARGEST_K3


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(`log_ratio`), at most e**20; no gradient beyond it, because a clipped infinity's would be NaN."""
    return torch.exp(log_ratio.clamp(max=LARGEST_LOG))


def k3(difference: torch.Tensor) -> torch.Tensor:
    """The estimate exp(-d) - 1 + d for `difference` d, without a bound."""
    # expm1 keeps small differences that exp() - 1 would lose in float32.
    return torch.expm1(-difference) + difference


def _k3_of_clamped(difference: torch.Tensor) -> torch.Tensor:
    return k3(difference.clamp(-LARGEST_LOG, LARGEST_LOG))


def _ratio(logprob: torch.Tensor, estimator: str, old: torch.Tensor | None) -> torch.Tensor | float:
    if not estimator.endswith("*"):
        return 1.0
    assert old is not None, "the log-probs of the policy that sampled the tokens are missing"
    return ratio_of(logprob - old)


def _value(difference: torch.Tensor, estimator: str, ratio: torch.Tensor | float = 1.0) -> torch.Tensor:
    match estimator:
        case "k1":
            return ratio * difference
        case "k2":
            return ratio * difference.square() / 2
        case "k3":
            return (ratio * _k3_of_clamped(difference)).clamp(max=_LARGEST_K3)
        case "abs":
            return difference.abs()
    raise AssertionError(f"no estimator {estimator}")
