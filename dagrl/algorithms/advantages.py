"""Advantage estimators without a critic, in float64 numpy; `dagrl.algorithms.token_returns` has the others.

Unless a docstring says otherwise, arguments, result, errors and constant groups are as in `grpo_advantages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb, sqrt
from typing import Literal

import numpy as np

from dagrl.data.batch import Column

ROUNDING = 1e-6
"""Relative spread below which rewards count as equal: a few ulps of float32. Dividing by a smaller standard deviation
would turn a rounding error into an advantage of 1."""


def grpo_advantages(
    rewards: np.ndarray, groups: np.ndarray, mask: Column, *, normalize_by_std: bool | Literal["batch"] = True
) -> Column:
    """Rewards relative to their group, the same for each token of a response.

    A = (r - mean(r)) / std(r) over the group (DeepSeekMath, arXiv 2402.03300, section 4.1.2). The paper does not define
    std; like other implementations this uses the sample standard deviation, with n - 1. Without `normalize_by_std`, A =
    r - mean(r). With ``batch``, std is taken over the rewards of the whole batch (arXiv 2508.08221), so that no group
    of nearly equal rewards is scaled up.

    A group of equal rewards, including a group of one, has advantage 0.

    `rewards` [S] has one reward per response; `groups` [S], any integers, are equal for responses to the same prompt,
    and complete; `mask` has rows as long as the responses. Returns float32, ragged as `mask` and 0 where it is 0.
    Raises ValueError if a reward is not finite.
    """
    return _per_token(_deviations(rewards, groups, normalize_by_std), mask)


def dr_grpo_advantages(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    """GRPO without the division by std (Dr. GRPO, arXiv 2503.20783, section 3.2).

    It also needs a loss that does not divide by the length of a response: ``aggregation: seq-mean-token-sum-norm``.
    """
    return grpo_advantages(rewards, groups, mask, normalize_by_std=False)


def rloo_advantages(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    """Each reward minus the mean of the others in its group: A_i = r_i - sum over j != i of r_j / (n - 1).

    REINFORCE leave-one-out (arXiv 2402.14740, section 3.3): the baseline of a response does not depend on it, so the
    policy gradient is unbiased. It equals n / (n - 1) times the deviation from the group's mean.
    """
    centred, group, sizes = _centred(rewards, groups, np.ones(len(mask)))
    return _per_token(centred * (sizes / np.maximum(sizes - 1, 1))[group], mask)


def opo_advantages(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    """Each reward minus its group's mean weighted by length: A_i = r_i - sum(l_j r_j) / sum(l_j).

    On-policy RL with optimal reward baseline (arXiv 2505.23585). The baseline of least variance weights rewards by the
    squared norm of their response's gradient, which the paper assumes to grow as the length l, the trained tokens.
    """
    return _per_token(_centred(rewards, groups, trained_tokens(mask))[0], mask)


def remax_advantages(
    rewards: np.ndarray, baseline_rewards: np.ndarray, mask: Column, charges: Column | None = None
) -> Column:
    """Each reward minus the reward of the greedy response to its prompt: A_t = r(x, y) - r(x, argmax) - later charges.

    ReMax (arXiv 2310.10505, algorithm 1): the greedy response is the baseline, which costs a sample and no critic. It
    does not depend on the response, so the policy gradient is unbiased. As in verl, a token's advantage includes its
    own charge and later ones: earlier charges do not depend on the token and would only add variance.

    `baseline_rewards` [S] are the rewards of the greedy responses to the same prompts, `charges` are as in
    `reinforce_plus_plus_advantages`, and other arguments, result and errors as in `grpo_advantages`.
    """
    compared = _finite(rewards) - _finite(baseline_rewards)
    return _per_token(compared, mask) if charges is None else _masked(_returns(compared, charges), mask)


def opmd_advantages(
    rewards: np.ndarray, groups: np.ndarray, mask: Column, *, baseline: Literal["mean", "logavgexp"], tau: float
) -> Column:
    """Each reward minus a baseline of mirror descent: A = r - b.

    Online policy mirror descent maximises E[r] - tau KL(policy || the one it sampled with). Its optimum has
    r - tau log(policy / sampled) = tau log Z for every response, with Z = E[exp(r / tau)] (Kimi k1.5, arXiv
    2501.12599, section 2.3.2). `baseline` selects the estimate of tau log Z: ``logavgexp`` is tau log(mean(exp(r /
    tau))) over the group, ``mean`` its limit for large tau, which Kimi and Trinity-RFT (arXiv 2505.17826) prefer.
    """
    if baseline == "mean":
        return grpo_advantages(rewards, groups, mask, normalize_by_std=False)
    rewards = _finite(rewards)
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    highest = np.full(len(sizes), -np.inf)
    np.maximum.at(highest, group, rewards)
    # Minus the maximum, so that exp() is in (0, 1].
    exps = np.exp((rewards - highest[group]) / tau)
    worth = highest + tau * np.log(np.bincount(group, exps, minlength=len(sizes)) / sizes)
    centred = rewards - worth[group]
    centred[_constant_groups(rewards, group, len(sizes))[group]] = 0.0
    return _per_token(centred, mask)


def gpg_advantages(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    """Deviations from the group's mean, scaled up to compensate for constant groups: A = alpha (r - mean).

    Group policy gradient (arXiv 2504.02546): groups whose rewards are all equal have no gradient, but count in the
    average of the loss; alpha = responses / responses of the other groups compensates. Its loss is ``reinforce``.
    """
    centred, group, sizes = _centred(rewards, groups, np.ones(len(mask)))
    telling = ~_constant_groups(_finite(rewards), group, len(sizes))[group]
    return _per_token(centred * (len(telling) / max(telling.sum(), 1)), mask)


def reinforce_plus_plus_advantages(rewards: np.ndarray, mask: Column, charges: Column | None = None) -> Column:
    """Returns of tokens, which `whitened` turns into advantages (REINFORCE++, arXiv 2501.03262).

    A_t = r - sum over i >= t of charge_i. Rewards are not discounted.

    `charges` are the tokens' KL penalties, ragged as `mask` and 0 where it is 0; see
    `dagrl.algorithms.reward_shaping.kl_charges`. The result is float64. Other arguments and errors are as in
    `grpo_advantages`.
    """
    rewards = _finite(rewards)
    returns = np.repeat(rewards, mask.lengths) if charges is None else _returns(rewards, charges)
    return Column(returns, mask.offsets)


def reinforce_plus_plus_baseline_advantages(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    """Deviations from the mean of the group, before `whitened` (REINFORCE++-baseline, arXiv 2501.03262).

    A = r - mean of the group. Unlike GRPO, this does not scale a group of nearly equal rewards up to the spread of the
    others.

    The result is float64. Arguments, errors and constant groups are as in `grpo_advantages`.
    """
    centred = _centred(rewards, groups, np.ones(len(mask)))[0]
    return Column(np.repeat(centred, mask.lengths), mask.offsets)


def maxrl_advantages(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    """Deviations from the group's mean, divided by it: A = (r - mean) / mean.

    Maximum-likelihood RL (arXiv 2602.02710): with rewards of 0 and 1, the gradient estimates the gradient of the log of
    the probability to be right, a series truncated after as many terms as there are responses. Prompts that are rarely
    solved weigh more.

    Rewards must not be negative. A group with mean 0 has advantage 0. Arguments, result, errors and constant groups are
    as in `grpo_advantages`.
    """
    centred, group, sizes = _centred(rewards, groups, np.ones(len(mask)))
    mean = np.bincount(group, rewards, minlength=len(sizes)) / sizes
    return _per_token(centred / np.where(mean > 0, mean, 1.0)[group], mask)


def gdpo_advantages(
    named_rewards: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    groups: np.ndarray,
    mask: Column,
    *,
    normalize_by_std: bool = True,
) -> Column:
    """Several rewards, each compared within its group, and their weighted sum, before `whitened`.

    Group reward-decoupled normalization (GDPO, arXiv 2601.05242): A = sum over k of w_k (r_k - mean_k) / std_k, so that
    a reward with a larger spread does not dominate the others. Then the sum is whitened over the batch: here over
    tokens, as in verl and in `reinforce_plus_plus_baseline_advantages`, whose loss also averages over tokens. TRL,
    NeMo-RL and ms-swift whiten over responses; the two are equal for responses of equal length.

    `named_rewards` and `weights` have the same names. The result is float64. Other arguments, errors and constant
    groups, of each reward by itself, are as in `grpo_advantages`.
    """
    total = np.zeros(len(mask))
    for name, weight in weights.items():
        _finite(named_rewards[name], f"`{name}`")
        total += weight * _deviations(named_rewards[name], groups, normalize_by_std)
    return Column(np.repeat(total, mask.lengths), mask.offsets)


def passk_advantages(rewards: np.ndarray, groups: np.ndarray, mask: Column, *, k: int) -> Column:
    """Advantages of responses as members of sets of k, whose reward is the best of the set.

    Pass@k training (arXiv 2508.10751, in its analytical form), over all C(n, k) sets of a group with c of n responses
    right: the mean reward of sets is rho = 1 - C(n - c, k) / C(n, k), their deviation sqrt(rho (1 - rho)). A right
    response has (1 - rho) / deviation; a wrong one (1 - rho - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / deviation, the
    mean over its sets.

    Rewards must be 0 or 1. Groups of fewer than k responses, and groups with deviation 0, have advantage 0. Other
    arguments and the result are as in `grpo_advantages`.
    """
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    right = np.bincount(group, rewards, minlength=len(sizes)).astype(int)
    of_wrong, of_right = np.zeros(len(sizes)), np.zeros(len(sizes))
    for place, (n, c) in enumerate(zip(sizes.tolist(), right.tolist(), strict=True)):
        fail = comb(n - c, k) / comb(n, k) if n >= k else 0.0
        if 0 < fail < 1:
            deviation = sqrt(fail * (1 - fail))
            of_right[place] = fail / deviation
            of_wrong[place] = (fail - comb(n - c - 1, k - 1) / comb(n - 1, k - 1)) / deviation
    return _per_token(np.where(np.asarray(rewards) > 0, of_right[group], of_wrong[group]), mask)


def grpo_passk_advantages(
    rewards: np.ndarray, groups: np.ndarray, mask: Column, *, normalize_by_std: bool = True
) -> Column:
    """The best response's lead on the second best, and 0 for all others: A = (highest - second) / std(r).

    Best-of-k policy gradient (arXiv 2503.19595), in the form of verl's ``grpo_passk``: without the best response, the
    group's best reward would be the second. Without `normalize_by_std`, A is the lead itself.
    """
    scaled = _deviations(rewards, groups, normalize_by_std)
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    # Each group's rows, the best ones last.
    order = np.lexsort((scaled, group))
    ends = np.cumsum(sizes)
    best, several = order[ends - 1], sizes > 1
    lead = np.zeros(len(scaled))
    lead[best[several]] = scaled[best[several]] - scaled[order[ends[several] - 2]]
    return _per_token(lead, mask)


def row_sums(column: Column) -> np.ndarray:
    """Sum of each row, float64 [rows]."""
    row = np.repeat(np.arange(len(column)), column.lengths)
    return np.bincount(row, column.values, minlength=len(column))


def trained_tokens(mask: Column) -> np.ndarray:
    """Number of each row's tokens in the mask, float64 [rows]."""
    return row_sums(Column(mask.values > 0, mask.offsets))


def _deviations(rewards: np.ndarray, groups: np.ndarray, normalize_by_std: bool | Literal["batch"]) -> np.ndarray:
    """Rewards minus their group's mean, divided by a sample deviation on request, float64 [S]."""
    centred, group, sizes = _centred(rewards, groups, np.ones(len(groups)))
    if normalize_by_std == "batch":
        # The deviation is 0 only if all rewards are equal; then there is nothing to scale.
        return centred / (np.std(rewards, ddof=1) if centred.any() else 1.0)
    if normalize_by_std:
        squares = np.bincount(group, centred**2, minlength=len(sizes))
        variance = squares / np.maximum(sizes - 1, 1)
        centred /= np.sqrt(np.where(squares > 0, variance, 1.0))[group]
    return centred


def _centred(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards minus their group's weighted mean, exactly 0 in constant groups; each row's group; group sizes.

    A group whose weights are all 0 has no trained tokens.
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
    """Groups whose rewards are equal up to rounding: bool [count]."""
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, group, rewards)
    np.maximum.at(high, group, rewards)
    return high - low <= ROUNDING * np.maximum(np.abs(low), np.abs(high))


def _finite(rewards: np.ndarray, name: str = "reward") -> np.ndarray:
    rewards = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"a {name} is {rewards[~np.isfinite(rewards)][0]}; rewards must be finite numbers")
    return rewards


def _returns(rewards: np.ndarray, charges: Column) -> np.ndarray:
    """Reward of the response minus the charges of this and later tokens, float64 [tokens]."""
    assert charges.offsets is not None
    before = np.concatenate([[0.0], np.cumsum(charges.values, dtype=np.float64)])
    to_come = np.repeat(before[charges.offsets[1:]], charges.lengths) - before[:-1]
    return np.repeat(rewards, charges.lengths) - to_come


def whitened(advantages: Column, mask: Column) -> Column:
    """Advantages of tokens, shifted and scaled to mean 0 and sample std 1 over all trained tokens of the batch.

    Returns float32, ragged as `mask`, which has rows for the whole batch, and 0 where it is 0. Equal values become 0.
    """
    active = mask.values > 0
    scaled = np.zeros(len(mask.values))
    chosen = advantages.values[active]
    if chosen.size and np.ptp(chosen) > ROUNDING * np.abs(chosen).max():
        scaled[active] = (chosen - chosen.mean()) / chosen.std(ddof=1)
    return Column(scaled.astype(np.float32), mask.offsets)


def _per_token(advantages: np.ndarray, mask: Column) -> Column:
    return _masked(np.repeat(advantages, mask.lengths), mask)


def _masked(advantages: np.ndarray, mask: Column) -> Column:
    return Column((advantages * (mask.values > 0)).astype(np.float32), mask.offsets)


def rae_advantages(
    rewards: np.ndarray, roles: Sequence[str], mask: Column, *, baselines: Mapping[str, float], decay: float
) -> tuple[Column, dict[str, float]]:
    """Each reward minus the baseline of its role, which then moves towards the reward.

    Role-conditioned advantage estimation (RAE) of SPIRAL (arXiv 2506.24119): one response after the other, A = r - b,
    then b = decay b + (1 - decay) r. Players of a game, whose rewards differ by role, are thus compared with their own
    past.

    `rewards` [S] and `roles` are in the order of responses. `baselines` are the ones before these responses; a new
    role's is 0. Returns the advantages, float32, ragged as `mask` and 0 where it is 0, and the baselines of all roles
    after the last response. Raises ValueError if a reward is not finite.
    """
    moved = dict(baselines)
    advantages = np.zeros(len(mask))
    for place, (role, reward) in enumerate(zip(roles, np.asarray(rewards, dtype=np.float64).tolist(), strict=True)):
        if not np.isfinite(reward):
            raise ValueError(f"a reward is {reward}; rewards must be finite numbers")
        before = moved.get(role, 0.0)
        advantages[place] = reward - before
        moved[role] = decay * before + (1 - decay) * reward
    values = np.repeat(advantages, mask.lengths) * (mask.values > 0)
    return Column(values.astype(np.float32), mask.offsets), moved
