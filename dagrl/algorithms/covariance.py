"""Selects the tokens that an update clips, penalises or masks, for ``clip_cov``, ``kl_cov`` and ``m2po``, in float64
numpy.

An update changes the entropy by minus the covariance of log-probs and advantages over tokens ("The Entropy Mechanism of
Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617), to which few tokens contribute most.
"""

from __future__ import annotations

import numpy as np

from dagrl.data.batch import Column


def covariances(logprob: Column, advantages: Column, mask: Column) -> np.ndarray:
    """Each token's term of the covariance: (log p - mean log p) (A - mean A) (arXiv 2505.22617).

    `logprob`, under the policy before the update, and `advantages` are ragged as `mask`; means are over the masked
    tokens of the whole batch. Returns float64 [tokens], 0 outside the mask.
    """
    counts = mask.values > 0
    if not counts.any():
        return np.zeros(len(counts))
    deviations = []
    for column in (logprob, advantages):
        values = column.values.astype(np.float64)
        deviations.append(values - values[counts].mean())
    return np.where(counts, deviations[0] * deviations[1], 0.0)


def highest(parts: np.ndarray, mask: Column, share: float) -> np.ndarray:
    """The `share` of tokens with the highest terms, at least one; bool [tokens].

    KL-Cov (arXiv 2505.22617). Ties are resolved by position.
    """
    counted = np.flatnonzero(mask.values > 0)
    chosen = np.zeros(len(parts), dtype=bool)
    by_part = counted[np.argsort(-parts[counted], kind="stable")]
    chosen[by_part[: _number(len(counted), share)]] = True
    return chosen


def drawn(
    parts: np.ndarray, mask: Column, share: float, *, lower: float, upper: float, random: np.random.Generator
) -> np.ndarray:
    """A random `share` of tokens, among those whose term is between the bounds; bool [tokens].

    Clip-Cov (arXiv 2505.22617): `share` of all tokens, at least one, or all between the bounds if there are fewer.
    """
    candidates = np.flatnonzero((mask.values > 0) & (parts > lower) & (parts < upper))
    number = min(_number(int(np.count_nonzero(mask.values > 0)), share), len(candidates))
    chosen = np.zeros(len(parts), dtype=bool)
    chosen[random.choice(candidates, number, replace=False)] = True
    return chosen


def squared_log_ratios(logprob: Column, sampled: Column, advantages: Column, mask: Column) -> np.ndarray:
    """(log r)**2 of the tokens whose ratio r has moved in the direction of their advantage, 0 elsewhere.

    Arguments are as in `covariances`; log r is `logprob` - `sampled`. Returns float64 [tokens].
    """
    log_ratio = logprob.values.astype(np.float64) - sampled.values
    up, down = (advantages.values > 0) & (log_ratio > 0), (advantages.values < 0) & (log_ratio < 0)
    return np.where((mask.values > 0) & (up | down), log_ratio**2, 0.0)


def beyond_moment(squares: np.ndarray, bound: float) -> np.ndarray:
    """The tokens to exclude so that the mean of the other `squares` above 0 is at most `bound`; bool [tokens].

    M2PO (arXiv 2510.01161, algorithm 1): the largest squares are selected, as few as possible.
    """
    moved = np.flatnonzero(squares > 0)
    by_square = moved[np.argsort(squares[moved], kind="stable")]
    means = np.cumsum(squares[by_square]) / np.arange(1, len(by_square) + 1)
    chosen = np.zeros(len(squares), dtype=bool)
    chosen[by_square[means > bound]] = True
    return chosen


def below_quantile(entropy: Column, mask: Column, share: float) -> np.ndarray:
    """The masked tokens that are not among the `share` with the highest entropies; bool [tokens].

    "Beyond the 80/20 rule" (arXiv 2506.01939), with 0.2: only tokens at which the policy is uncertain are trained. As
    in TRL, a token stays if its entropy is at least the quantile 1 - `share`, by linear interpolation.
    """
    counts, values = mask.values > 0, entropy.values.astype(np.float64)
    return counts & (values < np.quantile(values[counts], 1 - share)) if counts.any() else counts


def _number(tokens: int, share: float) -> int:
    return min(max(int(share * tokens), 1), tokens)
