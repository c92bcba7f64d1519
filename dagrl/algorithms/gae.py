"""Generalized advantage estimation: advantages of tokens by a critic's values. On the host, in float64 numpy.

`token_rewards` says where in a response its reward stands; `gae_advantages` what to make of that.
"""

from __future__ import annotations

import numpy as np

from dagrl.data.batch import Column


def gae_advantages(
    rewards: Column, values: Column, mask: Column, *, discount: float = 1.0, trace: float = 1.0
) -> tuple[Column, Column]:
    """Advantages and the critic's targets (arXiv 1506.02438, eq. 11, 12 and 16).

    With gamma = `discount`, lambda = `trace` and V = 0 after the last token:
    delta_t = r_t + gamma V_(t+1) - V_t, A_t = delta_t + gamma lambda A_(t+1), target_t = A_t + V_t.

    Tokens at 0 in the mask (a tool's words, say) are no actions: the token before them is followed by the next one
    that counts. What they are rewarded with is lost, so it belongs on a token of the policy.

    Args:
        rewards: reward of each response token, ragged; a score for the whole response stands on its last token.
        values: what the critic expects from each response token on, ragged alike.
        mask: ragged alike.
        discount: weight of a reward one token later.
        trace: 1 for unbiased returns, less for less variance.

    Returns:
        Advantages and targets, float32, ragged as `mask`, 0 outside it.

    """
    kept = np.flatnonzero(mask.values > 0)
    reward, value = rewards.values[kept].astype(np.float64), values.values[kept].astype(np.float64)
    row = np.repeat(np.arange(len(mask)), mask.lengths)[kept]
    counts = np.bincount(row, minlength=len(mask))
    ends = np.cumsum(counts)
    # All rows at once, backwards from their ends; those that have tokens left come first.
    by_length = np.argsort(-counts, kind="stable")
    ends, counts = ends[by_length], counts[by_length]
    advantage = np.zeros(len(kept))
    next_value, next_advantage = np.zeros(len(mask)), np.zeros(len(mask))
    for back in range(1, int(counts.max(initial=0)) + 1):
        rows = np.searchsorted(-counts, -back, side="right")
        at = ends[:rows] - back
        delta = reward[at] + discount * next_value[:rows] - value[at]
        advantage[at] = delta + discount * trace * next_advantage[:rows]
        next_value[:rows], next_advantage[:rows] = value[at], advantage[at]
    return _spread(advantage, kept, mask), _spread(advantage + value, kept, mask)


def token_rewards(
    rewards: np.ndarray, mask: Column, *, placed: Column | None = None, charges: Column | None = None
) -> Column:
    """The rewards of responses, on their tokens.

    All of a response's reward stands on its last token that counts, as in PPO for language models (Ziegler et al. 2019,
    arXiv 1909.08593, section 2), but for what `placed` says of single tokens: the rewards of a conversation's turns,
    say. The last token has what is left then, so that the sum over the response is its reward either way. What it is
    charged token by token, its divergence from the reference, is taken off each.

    Args:
        rewards: [S], of each response.
        mask: ragged, above 0 where a token is the policy's; a response without such tokens has no place for a reward.
        placed: ragged alike, or None.
        charges: ragged alike, or None.

    Returns:
        float64, ragged as `mask`.

    Raises:
        ValueError: a reward is not finite.

    """
    values = np.zeros(len(mask.values)) if placed is None else placed.values.astype(np.float64)
    wrong = [each for each in (rewards, values) if not np.isfinite(each).all()]
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
