"""Estimators of a KL divergence from single samples: charged to the loss, to the reward, or only reported."""

from __future__ import annotations

import torch

from dagrl.config.schema.objective import KlEstimator

_LARGEST_LOG = 20.0
"""``k3`` clamps log-ratios to this on either side, because exp() of a larger one may overflow."""
_LARGEST_K3 = 10.0
"""Largest value of ``k3``. The estimate grows as exp(-d): without a bound, one token that is far likelier under the
reference outweighs all others, and log-probs 89 apart overflow float32."""


def kl_estimate(logprob: torch.Tensor, reference: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Estimates of KL(policy || reference), one for each token; the tokens were drawn from the policy.

    `logprob` and `reference` are the log-probs of the same tokens under both, of one shape. With d = logprob -
    reference (Schulman 2020, http://joschu.net/blog/kl-approx.html, where r = exp(-d)):

    - ``k1`` = d: unbiased, but often negative and of high variance;
    - ``k2`` = d**2 / 2: biased, never negative;
    - ``k3`` = exp(-d) - 1 + d, at most 10: unbiased below that bound, never negative (GRPO, arXiv 2402.03300, eq. 4);
    - ``abs`` = |d|: biased and never negative; it grows no faster than d (verl has it by this name).

    That holds for values. Gradients taken through them differ (Tang & Munos 2025, arXiv 2506.09477): over the policy's
    own tokens that of k1 is zero on average, so as a loss it does not pull; that of k2 is the gradient of the token's
    KL(policy || reference), and that of k3 the gradient of KL(reference || policy). So ``k1+``, ``k3+`` and ``abs+``
    have the value of one and the gradient of k2.

    The bound of k3 is that of verl's ``low_var_kl``. It applies where d is below -2.61 or above 11. There k3 has no
    gradient, and k3+ keeps that of k2; `kl_clipped` returns these tokens. The other estimators have no bound, in verl
    neither: they grow as d or d**2.
    """
    difference = logprob - reference
    if estimator.endswith("+"):
        pull = difference.square() / 2
        return _value(difference, estimator[:-1]).detach() + (pull - pull.detach())
    return _value(difference, estimator)


def kl_clipped(logprob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Tokens at which `kl_estimate` cuts ``k3`` and ``k3+`` to their bound; bool."""
    return _k3_of_clamped(logprob - reference) > _LARGEST_K3


def k3(difference: torch.Tensor) -> torch.Tensor:
    """The estimate exp(-d) - 1 + d for `difference` d, without a bound."""
    # expm1 keeps the small difference that exp() - 1 would round away in float32.
    return torch.expm1(-difference) + difference


def _k3_of_clamped(difference: torch.Tensor) -> torch.Tensor:
    return k3(difference.clamp(-_LARGEST_LOG, _LARGEST_LOG))


def _value(difference: torch.Tensor, estimator: str) -> torch.Tensor:
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return _k3_of_clamped(difference).clamp(max=_LARGEST_K3)
        case "abs":
            return difference.abs()
    raise AssertionError(f"no estimator {estimator}")
