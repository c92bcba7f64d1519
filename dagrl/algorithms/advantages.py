"""Advantages: how much better a response is than expected. Run on the host, in float64 numpy, by the advantage node."""

from __future__ import annotations

import numpy as np
import torch

from dagrl.algorithms.kl import KlEstimator, kl_estimate
from dagrl.data.batch import Column

ROUNDING = 1e-6
"""Relative spread below which the rewards of a group count as equal: some ulps of float32. Without it, a difference in
the last bit would be blown up to an advantage of 1."""


def grpo_advantages(rewards: np.ndarray, groups: np.ndarray, mask: Column, *, normalize_by_std: bool = True) -> Column:
    """Rewards compared within their group, the same for each token of a response.

    A = (r - mean(r)) / std(r) over the group (DeepSeekMath, arXiv 2402.03300, section 4.1.2). The paper leaves open
    which std: here it is that of a sample, with n - 1, as in the usual implementations. `normalize_by_std` False leaves
    the division out (Dr. GRPO, arXiv 2503.20783, section 3.2).

    A group whose rewards are all equal, a group of one included, says nothing about what is better: advantage 0.

    Args:
        rewards: [S], one for each response.
        groups: [S], any integers; equal ones are answers to the same prompt. All of a group must be here.
        mask: ragged, rows as long as the responses; tokens at 0 get advantage 0.
        normalize_by_std: whether to divide.

    Returns:
        float32, ragged as `mask`.

    Raises:
        ValueError: a reward is not finite.

    """
    assert len(rewards) == len(groups) == len(mask)
    rewards = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"a reward is {rewards[~np.isfinite(rewards)][0]}; rewards must be finite numbers")
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    centred = rewards - (np.bincount(group, rewards) / sizes)[group]
    constant = _constant_groups(rewards, group, len(sizes))
    centred[constant[group]] = 0.0
    if normalize_by_std:
        variance = np.bincount(group, centred**2) / np.maximum(sizes - 1, 1)
        centred /= np.sqrt(np.where(constant, 1.0, variance))[group]
    per_token = np.repeat(centred, mask.lengths) * (mask.values > 0)
    return Column(per_token.astype(np.float32), mask.offsets)


def _constant_groups(rewards: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Which groups hold equal rewards, up to rounding: bool [count]."""
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, group, rewards)
    np.maximum.at(high, group, rewards)
    return high - low <= ROUNDING * np.maximum(np.abs(low), np.abs(high))


def kl_charged_rewards(
    rewards: np.ndarray,
    policy_logprob: Column,
    ref_logprob: Column,
    mask: Column,
    *,
    coef: float,
    estimator: KlEstimator,
) -> np.ndarray:
    """Rewards less `coef` times the response's divergence from the reference: r - coef * log(policy / ref).

    That is eq. 2 of Ziegler et al. 2019 (arXiv 1909.08593) with `estimator` in place of the log-ratio, which is k1.
    PPO charges each token its own term; GRPO has one reward for a whole response, so here the terms of the response's
    tokens with mask above 0 are summed and charged at once, before groups are compared.

    Args:
        rewards: [S].
        policy_logprob: ragged, log-probs of the response tokens under the policy that is trained, before the update.
        ref_logprob: the same under the reference.
        mask: ragged, 0 where a token is not charged.
        coef: weight of the penalty.
        estimator: see `kl_estimate`.

    Returns:
        float64 [S].

    """
    policy = torch.from_numpy(policy_logprob.values.astype(np.float64))
    reference = torch.from_numpy(ref_logprob.values.astype(np.float64))
    per_token = np.where(mask.values > 0, kl_estimate(policy, reference, estimator).numpy(), 0.0)
    row = np.repeat(np.arange(len(mask)), mask.lengths)
    return np.asarray(rewards, dtype=np.float64) - coef * np.bincount(row, per_token, minlength=len(mask))
