"""Penalties and shaping of rewards before advantages are computed, in float64 numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dagrl.data.batch import Column

if TYPE_CHECKING:
    from dagrl.algorithms.kl import KlEstimator


def kl_charges(
    policy_logprob: Column, ref_logprob: Column, mask: Column, *, coef: float, estimator: KlEstimator
) -> tuple[Column, np.ndarray]:
    """KL penalty of each token: coef * log(policy / ref).

    Eq. 2 of Ziegler et al. 2019 (arXiv 1909.08593), with `estimator` in place of the log-ratio (k1). PPO, REINFORCE++
    and ReMax charge each token its own term; estimators with one reward per response charge the sum.

    Log-probs, of the trained policy before the update and of the reference, are ragged as `mask`. Returns the charges,
    float64, ragged as `mask` and 0 outside it, and the tokens at the bound of ``k3``, see `kl_estimate`, bool [tokens].
    Raises ValueError if the estimate of a charged token is not finite.
    """
    # Imported here, because a CPU worker without charges does not need torch.
    import torch

    from dagrl.algorithms.kl import kl_clipped, kl_estimate

    policy = torch.from_numpy(policy_logprob.values.astype(np.float64))
    reference = torch.from_numpy(ref_logprob.values.astype(np.float64))
    charged = mask.values > 0
    divergence = np.where(charged, kl_estimate(policy, reference, estimator).numpy(), 0.0)
    if not np.isfinite(divergence).all():
        wrong = np.flatnonzero(~np.isfinite(divergence))[0]
        raise ValueError(
            f"a token's divergence from the reference is {divergence[wrong]}: its log-prob is {policy[wrong]:g} under "
            f"the policy and {reference[wrong]:g} under the reference; look for weights or logits that are not finite"
        )
    clipped = charged & kl_clipped(policy, reference).numpy() if estimator == "k3" else np.zeros_like(charged)
    return Column(coef * divergence, mask.offsets), clipped


def overlong_penalty(lengths: np.ndarray, *, longest: np.ndarray | int, buffer: int, factor: float) -> np.ndarray:
    """Penalty of responses close to the length limit: 0 or less.

    Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13), times `factor`: 0 up to longest - buffer tokens, then
    falling linearly to -1 at the longest, and -1 beyond.

    `lengths` [S] are the responses' tokens, `longest` is the limit L_max, of all or of each [S], and `buffer` is
    L_cache, at least 1. Returns float64 [S].
    """
    return factor * np.clip((longest - buffer - np.asarray(lengths, dtype=np.float64)) / buffer, -1.0, 0.0)


def length_rewards(right: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Reward between -0.5 and 0.5 for the shorter responses of a group.

    Kimi k1.5's length penalty (arXiv 2501.12599, section 2.3.3): lambda = 0.5 - (length - shortest) / (longest -
    shortest) over all responses of the group, and min(0, lambda) for wrong ones; 0 if all have the same length.

    `right`, bool, and `lengths`, in tokens, are [S]; `groups` are as in `grpo_advantages`. Returns float64 [S].
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    _, group = np.unique(groups, return_inverse=True)
    count = group.max(initial=-1) + 1
    shortest, longest = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(shortest, group, lengths)
    np.maximum.at(longest, group, lengths)
    spread = (longest - shortest)[group]
    place = 0.5 - (lengths - shortest[group]) / np.where(spread > 0, spread, 1.0)
    return np.where(spread > 0, np.where(right, place, np.minimum(place, 0.0)), 0.0)


def cosine_rewards(
    right: np.ndarray,
    lengths: np.ndarray,
    *,
    longest: np.ndarray | int,
    right_from_to: tuple[float, float],
    wrong_from_to: tuple[float, float],
    exceeded: float,
) -> np.ndarray:
    """Rewards by correctness and length, along half a cosine from length 0 to the limit.

    "Demystifying long chain-of-thought reasoning" (arXiv 2502.03373, its cosine reward): with (a, b) of right or of
    wrong responses, b + (a - b) (1 + cos(pi length / longest)) / 2; `exceeded` at the limit, `longest`.

    `right`, bool, and `lengths`, in tokens, are [S]. Returns float64 [S].
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    along = (1 + np.cos(np.pi * lengths / longest)) / 2
    first, last = (np.where(right, *pair) for pair in zip(right_from_to, wrong_from_to, strict=True))
    return np.where(lengths >= longest, exceeded, last + (first - last) * along)


_LARGEST_ERROR = 0.2


def steered(coef: float, *, divergence: float, samples: float, target: float, horizon: float) -> float:
    """The coefficient after a step: coef (1 + error samples / horizon), with error = divergence / target - 1.

    The proportional controller of Ziegler et al. 2019 (arXiv 1909.08593, section 2.2), with its error clipped to 0.2
    and its K as samples / horizon, as in their code. Samples count up to the horizon, so that the result stays above 0.

    `divergence` of the policy from the reference is by the penalty's estimator; `samples` is the step's number of them.
    """
    error = min(max(divergence / target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
    return coef * (1 + error * min(samples / horizon, 1.0))
