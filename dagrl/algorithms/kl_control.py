"""Adaptive KL coefficient."""

from __future__ import annotations

_LARGEST_ERROR = 0.2


def steered(coef: float, *, divergence: float, samples: float, target: float, horizon: float) -> float:
    """The coefficient after a step: coef (1 + error samples / horizon), with error = divergence / target - 1.

    The proportional controller of Ziegler et al. 2019 (arXiv 1909.08593, section 2.2), with its error clipped to 0.2
    and its K as samples / horizon, as in their code. Samples count up to the horizon, so that the result stays above 0.

    `divergence` of the policy from the reference is by the penalty's estimator; `samples` is the step's number of them.
    """
    error = min(max(divergence / target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
    return coef * (1 + error * min(samples / horizon, 1.0))
