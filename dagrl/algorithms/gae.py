"""Generalized advantage estimation, in float64 numpy.

`token_rewards` places a response's reward on its tokens; `gae_advantages` computes advantages from those.
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
    them. Rewards on them are lost, so rewards must be on tokens of the policy.

    `rewards`, with the score of a whole response on its last token, and `values`, the critic's estimates, are ragged as
    `mask`. `trace` is one for all rows, or one for each [S], see `length_adaptive_traces`. Returns advantages and
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

    Length-adaptive GAE of VAPO (arXiv 2504.05118): the weights of the n-step estimates add up to alpha l,
    so that they reach equally far into long and short responses. At least 0, as in NeMo-RL.
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
