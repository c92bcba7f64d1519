"""Advantages: how much better a response is than expected. Run on the host, in float64 numpy, by the advantage node.

None of these needs a critic; `dagrl.algorithms.gae` holds the one that does.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from dagrl.data.batch import Column

ROUNDING = 1e-6
"""Relative spread below which rewards count as equal: some ulps of float32. Without it, a difference in the last bit
would be blown up to an advantage of 1."""


def grpo_advantages(rewards: np.ndarray, groups: np.ndarray, mask: Column, *, normalize_by_std: bool = True) -> Column:
    """Rewards compared within their group, the same for each token of a response.

    A = (r - mean(r)) / std(r) over the group (DeepSeekMath, arXiv 2402.03300, section 4.1.2). The paper leaves open
    which std: here it is that of a sample, with n - 1, as in the usual implementations. `normalize_by_std` False leaves
    the division out: A = r - mean(r), Dr. GRPO's (arXiv 2503.20783, section 3.2). Dr. GRPO is whole only with a loss
    that does not divide by the length of a response either: ``aggregation: seq-mean-token-sum-norm``.

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
    centred, group, sizes = _centred(rewards, groups, np.ones(len(mask)))
    if normalize_by_std:
        squares = np.bincount(group, centred**2, minlength=len(sizes))
        variance = squares / np.maximum(sizes - 1, 1)
        centred /= np.sqrt(np.where(squares > 0, variance, 1.0))[group]
    return _per_token(centred, mask)


def rloo_advantages(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    """Each reward less the mean of the others in its group: A_i = r_i - sum over j != i of r_j / (n - 1).

    REINFORCE leave-one-out (arXiv 2402.14740, section 3.3): the baseline does not depend on the response it is taken
    from, so the policy gradient stays unbiased. It is n / (n - 1) times the deviation from the mean of all.

    Arguments, result, errors, and groups without a difference as in `grpo_advantages`.
    """
    centred, group, sizes = _centred(rewards, groups, np.ones(len(mask)))
    return _per_token(centred * (sizes / np.maximum(sizes - 1, 1))[group], mask)


def opo_advantages(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    """Each reward less the mean of its group weighted by length: A_i = r_i - sum(l_j r_j) / sum(l_j).

    On-policy RL with optimal reward baseline (arXiv 2505.23585). The baseline of least variance weighs rewards with the
    squared norm of their response's gradient, which the paper takes to grow as the length l, the tokens to train on.

    Arguments, result, errors, and groups without a difference as in `grpo_advantages`.
    """
    return _per_token(_centred(rewards, groups, row_sums(_ones(mask)))[0], mask)


def remax_advantages(
    rewards: np.ndarray, baseline_rewards: np.ndarray, mask: Column, charges: Column | None = None
) -> Column:
    """Each reward less that of the likeliest response to its prompt: A_t = r(x, y) - r(x, argmax) - charges to come.

    ReMax (arXiv 2310.10505, algorithm 1): the greedy response, a sample that costs no critic, is the baseline. It does
    not depend on the response it is taken from, so the policy gradient stays unbiased; where both are equally good,
    the response says nothing. A token answers for its own charge and those after it, as in verl: what came before it
    does not depend on it and would only add variance.

    Args:
        rewards: [S], one for each response.
        baseline_rewards: [S], of the greedy response to the same prompt.
        mask: ragged, rows as long as the responses; tokens at 0 get advantage 0.
        charges: as in `reinforce_plus_plus_advantages`.

    Returns:
        float32, ragged as `mask`.

    Raises:
        ValueError: a reward is not finite.

    """
    compared = _finite(rewards) - _finite(baseline_rewards)
    return _per_token(compared, mask) if charges is None else _masked(_returns(compared, charges), mask)


def opmd_advantages(
    rewards: np.ndarray, groups: np.ndarray, mask: Column, *, baseline: Literal["mean", "logavgexp"], tau: float
) -> Column:
    """Each reward less what mirror descent takes for its group's worth: A = r - b.

    Online policy mirror descent maximises E[r] - tau KL(policy || the one it sampled with). Its optimum has
    r - tau log(policy / sampled) = tau log Z for every response, Z = E[exp(r / tau)] (Kimi k1.5, arXiv 2501.12599,
    section 2.3.2). `baseline` is what stands for tau log Z: ``logavgexp`` its estimate tau log(mean(exp(r / tau))) over
    the group, ``mean`` the limit for large tau, which both Kimi and Trinity-RFT (arXiv 2505.17826) prefer.

    Arguments, result, errors, and groups without a difference as in `grpo_advantages`.
    """
    if baseline == "mean":
        return grpo_advantages(rewards, groups, mask, normalize_by_std=False)
    rewards = _finite(rewards)
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    highest = np.full(len(sizes), -np.inf)
    np.maximum.at(highest, group, rewards)
    # Less the highest, so that exp() is within (0, 1].
    exps = np.exp((rewards - highest[group]) / tau)
    worth = highest + tau * np.log(np.bincount(group, exps, minlength=len(sizes)) / sizes)
    centred = rewards - worth[group]
    centred[_constant_groups(rewards, group, len(sizes))[group]] = 0.0
    return _per_token(centred, mask)


def gpg_advantages(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    """Deviations from the group's mean, scaled up for the groups that say nothing: A = alpha (r - mean).

    Group policy gradient (arXiv 2504.02546): responses of groups whose rewards are all equal have no gradient, but
    count where the loss is averaged; alpha = responses / responses of the other groups makes up for that. Its loss is
    ``reinforce``.

    Arguments, result, errors, and groups without a difference as in `grpo_advantages`, but for the whole batch.
    """
    centred, group, sizes = _centred(rewards, groups, np.ones(len(mask)))
    telling = ~_constant_groups(_finite(rewards), group, len(sizes))[group]
    return _per_token(centred * (len(telling) / max(telling.sum(), 1)), mask)


def reinforce_plus_plus_advantages(rewards: np.ndarray, mask: Column, charges: Column | None = None) -> Column:
    """Returns of tokens, whitened over the whole batch (REINFORCE++, arXiv 2501.03262).

    A_t = r - sum over i >= t of charge_i, then (A - mean(A)) / std(A) over all tokens of the batch to train on; the
    std is that of a sample. Rewards are not discounted. Equal returns all over the batch give advantage 0.

    Args:
        rewards: [S], one for each response: the whole batch, for it is compared with itself.
        mask: ragged, rows as long as the responses; tokens at 0 are left out and get advantage 0.
        charges: what each token is charged for its divergence from the reference, ragged as `mask`, 0 where the mask
            is. See `dagrl.algorithms.reward_shaping.kl_charges`.

    Returns:
        float32, ragged as `mask`.

    Raises:
        ValueError: a reward is not finite.

    """
    rewards = _finite(rewards)
    returns = np.repeat(rewards, mask.lengths) if charges is None else _returns(rewards, charges)
    return whitened(returns, mask)


def reinforce_plus_plus_baseline_advantages(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    """Deviations from the group's mean, whitened over the whole batch (REINFORCE++-baseline, arXiv 2501.03262).

    A = r - mean of the group, then (A - mean(A)) / std(A) over all tokens of the batch to train on; the std is that of
    a sample. So a group of nearly equal rewards is not blown up to the same spread as the others, as GRPO does.

    Arguments, result, errors, and groups without a difference as in `grpo_advantages`, but for the whole batch.
    """
    centred = _centred(rewards, groups, np.ones(len(mask)))[0]
    return whitened(np.repeat(centred, mask.lengths), mask)


def row_sums(column: Column) -> np.ndarray:
    """Sum of each row, float64 [rows]."""
    row = np.repeat(np.arange(len(column)), column.lengths)
    return np.bincount(row, column.values, minlength=len(column))


def _centred(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards less their group's mean by `weights`, exactly 0 where all are equal; each row's group, and group sizes.

    A group whose weights are all 0 has no mean, and no token either that would need one.
    """
    assert len(rewards) == len(groups) == len(weights)
    rewards = _finite(rewards)
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    total = np.bincount(group, weights, minlength=len(sizes))
    mean = np.bincount(group, weights * rewards, minlength=len(sizes)) / np.where(total > 0, total, 1.0)
    centred = rewards - mean[group]
    centred[_constant_groups(rewards, group, len(sizes))[group]] = 0.0
    return centred, group, sizes


def _constant_groups(rewards: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Which groups hold equal rewards, up to rounding: bool [count]."""
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, group, rewards)
    np.maximum.at(high, group, rewards)
    return high - low <= ROUNDING * np.maximum(np.abs(low), np.abs(high))


def _finite(rewards: np.ndarray) -> np.ndarray:
    rewards = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"a reward is {rewards[~np.isfinite(rewards)][0]}; rewards must be finite numbers")
    return rewards


def _returns(rewards: np.ndarray, charges: Column) -> np.ndarray:
    """Each response's reward at each of its tokens, less the token's charge and those after it, float64 [tokens]."""
    assert charges.offsets is not None
    before = np.concatenate([[0.0], np.cumsum(charges.values, dtype=np.float64)])
    to_come = np.repeat(before[charges.offsets[1:]], charges.lengths) - before[:-1]
    return np.repeat(rewards, charges.lengths) - to_come


def whitened(values: np.ndarray, mask: Column) -> Column:
    """Values of tokens, moved and scaled to mean 0 and sample std 1 over those in the mask; 0 for the others."""
    active = mask.values > 0
    scaled = np.zeros(len(values))
    chosen = values[active]
    if chosen.size and np.ptp(chosen) > ROUNDING * np.abs(chosen).max():
        scaled[active] = (chosen - chosen.mean()) / chosen.std(ddof=1)
    return Column(scaled.astype(np.float32), mask.offsets)


def _ones(mask: Column) -> Column:
    return Column((mask.values > 0).astype(np.float64), mask.offsets)


def _per_token(advantages: np.ndarray, mask: Column) -> Column:
    """The same advantage for each token of a response."""
    return _masked(np.repeat(advantages, mask.lengths), mask)


def _masked(advantages: np.ndarray, mask: Column) -> Column:
    """Advantages of tokens, 0 outside the mask."""
    return Column((advantages * (mask.values > 0)).astype(np.float32), mask.offsets)
