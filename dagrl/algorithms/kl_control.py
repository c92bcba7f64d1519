"""Adaptive KL coefficient."""

from __future__ import annotations

_LARGEST_ERROR = 0.2


def steered(coef: float, *, divergence: float, samples: float, target: float, horizon: float) -> float:
    """The coefficient after a step: coef (1 + error samples / horizon), with error = divergence / target - 1.

    The proportional controller of Ziegler et al. 2019 (arXiv 1909.08593, section 2.2), with its error clipped to 0.2
    and its K as samples / horizon, as in their code. Samples count up to the horizon, so that the result stays above 0.

    Args:
        coef: coefficient of the step, above 0.
        divergence: the policy's divergence from the reference, by the same estimator as the penalty.
        samples: number of samples of the step.
        target: desired divergence, in the same unit.
        horizon: samples over which the coefficient changes by at most a fifth.

    """
    error = min(max(divergence / target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
    return coef * (1 + error * min(samples / horizon, 1.0))
