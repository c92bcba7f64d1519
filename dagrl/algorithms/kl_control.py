"""The weight of a divergence, steered so that the divergence comes near a target."""

from __future__ import annotations

_LARGEST_ERROR = 0.2


def steered(coef: float, *, divergence: float, samples: float, target: float, horizon: float) -> float:
    """The weight after a step: coef (1 + error samples / horizon), with error = divergence / target - 1.

    The proportional controller of Ziegler et al. 2019 (arXiv 1909.08593, section 2.2), with its bound on the error,
    0.2, and its K in the form samples / horizon, as in their code. A step of more samples than the horizon counts as
    one of the horizon, so that the weight stays above 0.

    Args:
        coef: weight of the step, above 0.
        divergence: what the policy's divergence from the reference came to, by the estimator that is charged.
        samples: how many the step had.
        target: what it should be, in the same unit.
        horizon: samples over which the weight grows or shrinks by a fifth at most.

    """
    error = min(max(divergence / target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
    return coef * (1 + error * min(samples / horizon, 1.0))
