"""Which tokens would cost a policy most of its entropy: for ``clip_cov`` and ``kl_cov``. On the host, in float64 numpy.

A policy's entropy changes by minus the covariance of log-probs and advantages over its tokens ("The Entropy Mechanism
of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617), and few tokens make up most of it.
"""

from __future__ import annotations

import numpy as np

from dagrl.data.batch import Column


def covariances(logprob: Column, advantages: Column, mask: Column) -> np.ndarray:
    """Each token's part in the covariance: (log p - mean log p) (A - mean A) (arXiv 2505.22617).

    Args:
        logprob: of the response tokens under the policy, before the update; ragged.
        advantages: ragged alike.
        mask: ragged alike; means are those of the tokens above 0, of the whole batch.

    Returns:
        float64 [tokens]; 0 outside of the mask.

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
    """The tokens with the highest parts in the covariance, `share` of all and at least one; bool [tokens].

    KL-Cov's choice (arXiv 2505.22617). Of equal ones the first.
    """
    counted = np.flatnonzero(mask.values > 0)
    chosen = np.zeros(len(parts), dtype=bool)
    by_part = counted[np.argsort(-parts[counted], kind="stable")]
    chosen[by_part[: _number(len(counted), share)]] = True
    return chosen


def drawn(
    parts: np.ndarray, mask: Column, share: float, *, lower: float, upper: float, random: np.random.Generator
) -> np.ndarray:
    """Tokens whose part in the covariance is between the bounds, drawn evenly; bool [tokens].

    Clip-Cov's choice (arXiv 2505.22617): `share` of all tokens and at least one, or all that are between the bounds
    where there are no more.
    """
    candidates = np.flatnonzero((mask.values > 0) & (parts > lower) & (parts < upper))
    number = min(_number(int(np.count_nonzero(mask.values > 0)), share), len(candidates))
    chosen = np.zeros(len(parts), dtype=bool)
    chosen[random.choice(candidates, number, replace=False)] = True
    return chosen


def _number(tokens: int, share: float) -> int:
    return min(max(int(share * tokens), 1), tokens)
