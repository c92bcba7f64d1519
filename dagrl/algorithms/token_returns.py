"""Advantages from the rewards of tokens, in float64 numpy.

`token_rewards` places rewards on tokens; the other functions are generalized advantage estimation, returns of turns,
and the optimal token baseline.
"""

from __future__ import annotations

import numpy as np

from dagrl.data.batch import Column


def gae_advantages(
    rewards: Column, values: Column, mask: Column, *, discount: float = 1.0, trace: float | np.ndarray = 1.0
) -> tuple[Column, Column]:
    """Advantages and the critic's targets (arXiv 1506.02438, eq. 11, 12 and 16).

    With gamma = `discount`, lambda = `trace` and V = 0 after the last token:
    delta_t = r_t + gamma V_(t+1) - V_t, A_t = delta_t + gamma lambda A_(t+1), target_t = A_t + V_t.

    Tokens with 0 in the mask (a tool's output, say) are not actions: the next unmasked token follows the one before
    them. Rewards on them are ignored, so rewards must be on tokens of the policy.

    `rewards`, with the score of a whole response on its last token, and `values`, the critic's estimates, are ragged as
    `mask`. `trace` is one value for all rows, or one for each [S], see `length_adaptive_traces`. Returns advantages and
    targets, float32, ragged as `mask` and 0 outside it.
    """
    kept = np.flatnonzero(mask.values > 0)
    reward, value = rewards.values[kept].astype(np.float64), values.values[kept].astype(np.float64)
    row = np.repeat(np.arange(len(mask)), mask.lengths)[kept]
    counts = np.bincount(row, minlength=len(mask))
    ends = np.cumsum(counts)
    # All rows at once, backwards from their ends; rows with tokens left come first.
    by_length = np.argsort(-counts, kind="stable")
    ends, counts = ends[by_length], counts[by_length]
    decay = discount * np.broadcast_to(trace, len(mask))[by_length]
    advantage = np.zeros(len(kept))
    next_value, next_advantage = np.zeros(len(mask)), np.zeros(len(mask))
    for back in range(1, int(counts.max(initial=0)) + 1):
        rows = np.searchsorted(-counts, -back, side="right")
        at = ends[:rows] - back
        delta = reward[at] + discount * next_value[:rows] - value[at]
        advantage[at] = delta + decay[:rows] * next_advantage[:rows]
        next_value[:rows], next_advantage[:rows] = value[at], advantage[at]
    return _spread(advantage, kept, mask), _spread(advantage + value, kept, mask)


def length_adaptive_traces(mask: Column, alpha: float) -> np.ndarray:
    """A lambda for each response that grows with its length l, the tokens in the mask: 1 - 1 / (alpha l), float64 [S].

    Length-adaptive GAE of VAPO (arXiv 2504.05118): the weights of the n-step estimates add up to alpha l, so that they
    reach equally far in long and short responses. At least 0, as in NeMo-RL.
    """
    row = np.repeat(np.arange(len(mask)), mask.lengths)
    lengths = np.bincount(row, mask.values > 0, minlength=len(mask))
    return 1 - 1 / np.maximum(alpha * lengths, 1.0)


def token_rewards(
    rewards: np.ndarray, mask: Column, *, placed: Column | None = None, charges: Column | None = None
) -> Column:
    """Rewards placed on the tokens of responses.

    A response's reward is placed on its last unmasked token, as in PPO for language models (Ziegler et al. 2019, arXiv
    1909.08593, section 2). If `placed` has rewards of single tokens, such as those of turns, the last token gets the
    remainder, so that the sum is the response's reward. Per-token `charges` are subtracted.

    `rewards` [S] has one reward per response; one without unmasked tokens gets none. Returns float64, ragged as `mask`,
    `placed` and `charges`. Raises ValueError if a reward is not finite.
    """
    values = np.zeros(len(mask.values)) if placed is None else placed.values.astype(np.float64)
    wrong = [numbers for numbers in (rewards, values) if not np.isfinite(numbers).all()]
    if wrong:
        raise ValueError(f"a reward is {wrong[0][~np.isfinite(wrong[0])][0]}; rewards must be finite numbers")
    row = np.repeat(np.arange(len(mask)), mask.lengths)
    values = np.where(mask.values > 0, values, 0.0)
    left = rewards - np.bincount(row, values, minlength=len(mask))
    # The last of equal indices wins.
    last = np.full(len(mask), -1)
    kept = np.flatnonzero(mask.values > 0)
    last[row[kept]] = kept
    ended = last >= 0
    values[last[ended]] += left[ended]
    return Column(values if charges is None else values - charges.values, mask.offsets)


def _spread(values: np.ndarray, places: np.ndarray, mask: Column) -> Column:
    spread = np.zeros(len(mask.values), dtype=np.float32)
    spread[places] = values
    return Column(spread, mask.offsets)


def turn_returns(token_rewards: Column, mask: Column, *, discount: float) -> Column:
    """The return of each turn on all of its tokens: R_k = r_k + discount R_(k + 1), before `whitened`.

    As ROLL's ``agentic_reinforce``, which takes the reward on a turn's last token alone. A turn is an unbroken run of
    tokens in the mask, and r_k the sum of the rewards on them; after the last turn of a row R is 0.

    `token_rewards` is ragged as `mask`. Returns float64, ragged as `mask` and 0 where it is 0.
    """
    in_turn = mask.values > 0
    row = np.repeat(np.arange(len(mask)), mask.lengths)
    follows = np.concatenate([[False], in_turn[:-1] & (row[1:] == row[:-1])])[: len(row)]
    begins = np.flatnonzero(in_turn & ~follows)
    kept = np.flatnonzero(in_turn)
    turn = np.searchsorted(begins, kept, side="right") - 1
    returns = np.bincount(turn, token_rewards.values[kept], minlength=len(begins))
    for place in range(len(begins) - 2, -1, -1):
        if row[begins[place]] == row[begins[place + 1]]:
            returns[place] += discount * returns[place + 1]
    values = np.zeros(len(row))
    values[kept] = returns[turn]
    return Column(values, mask.offsets)


def optimal_token_baseline_advantages(
    token_rewards: Column, groups: np.ndarray, mask: Column, *, logprob: Column, square_sums: Column
) -> Column:
    """Returns minus a baseline for each token: A_t = G_t - B_t (optimal token baseline, OTB, arXiv 2602.07078).

    G_t are the rewards from token t on. With p_t the token's probability and Pi_t the sum of all squared probabilities
    of its distribution, w_t = 1 - 2 p_t + Pi_t is the squared norm of its gradient with respect to the logits, and W_t
    the sum of w up to t. The baseline of least variance is B_t = sum of G_t W_t / sum of W_t over the responses of the
    group that have a token t. It is 0 if only one response has a token t, as in verl.

    t counts only tokens of the policy, not answers of tools: verl's ``tir_optimal_token_baseline``, which is
    ``optimal_token_baseline`` where all tokens count.

    `token_rewards` are the rewards of tokens, the log-probs are from before the update; all are ragged as `mask`.
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
    return _spread(to_come - baseline[place], kept, mask)


def _sums_in_rows(values: np.ndarray, row: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Running sums within rows. `first`: index of each row's first value."""
    before = np.concatenate([[0.0], np.cumsum(values)])
    return before[1:] - before[first[row]]
