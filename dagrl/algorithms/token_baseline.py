"""The optimal token baseline, in float64 numpy."""

from __future__ import annotations

import numpy as np

from dagrl.data.batch import Column


def optimal_token_baseline_advantages(
    token_rewards: Column, groups: np.ndarray, mask: Column, *, logprob: Column, square_sums: Column
) -> Column:
    """Returns minus a baseline for each token: A_t = G_t - B_t (optimal token baseline, OTB, arXiv 2602.07078).

    G_t are the rewards from token t on. With p_t the token's probability and Pi_t the sum of all squared probabilities
    of its distribution, w_t = 1 - 2 p_t + Pi_t is the squared norm of its gradient with respect to the logits, and W_t
    the sum of w up to t. The baseline of least variance is B_t = sum of G_t W_t / sum of W_t over the responses of the
    group that have a token t. It is 0 where a response is alone, as in verl.

    t counts the tokens of the policy, so answers of tools do not shift it: verl's ``tir_optimal_token_baseline``, which
    is ``optimal_token_baseline`` where all tokens count.

    `token_rewards` are the rewards of tokens, the log-probs are those before the update; all are ragged as `mask`.
    Returns float32, ragged as `mask` and 0 where it is 0. `groups` [S] are as in `grpo_advantages`.
    """
    kept = np.flatnonzero(mask.values > 0)
    row = np.repeat(np.arange(len(mask)), mask.lengths)[kept]
    counts = np.bincount(row, minlength=len(mask))
    first = np.cumsum(counts) - counts
    time = np.arange(len(kept)) - first[row]
    weight = 1 - 2 * np.exp(logprob.values[kept].astype(np.float64)) + square_sums.values[kept]
    # Rounding of float32 can make the weight of a certain token negative.
    passed = _sums_in_rows(np.maximum(weight, 0.0), row, first)
    reward = token_rewards.values[kept].astype(np.float64)
    to_come = np.bincount(row, reward, minlength=len(mask))[row] - _sums_in_rows(reward, row, first) + reward

    _, group = np.unique(groups, return_inverse=True)
    place = group[row] * (int(counts.max(initial=0)) + 1) + time
    _, place = np.unique(place, return_inverse=True)
    total = np.bincount(place, passed)
    baseline = np.bincount(place, to_come * passed) / np.where(total > 0, total, 1.0)
    baseline[np.bincount(place) == 1] = 0.0
    advantages = np.zeros(len(mask.values), dtype=np.float32)
    advantages[kept] = to_come - baseline[place]
    return Column(advantages, mask.offsets)


def _sums_in_rows(values: np.ndarray, row: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Running sums within rows. `first`: index of each row's first value."""
    before = np.concatenate([[0.0], np.cumsum(values)])
    return before[1:] - before[first[row]]
