"""What k of a prompt's n responses are worth: ``pass@k``, ``best@k``, ``worst@k``, ``maj@k``, without bias.

With more responses than are asked for, every choice of k of them is a trial; each figure is the mean over all trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb

import numpy as np

MAJORITY_TRIALS = 256
"""Choices of k responses that are looked at for ``maj@k``; all of them where there are no more."""


def best_at_k(rewards: np.ndarray, k: int) -> np.ndarray:
    """Expected reward of the best of k responses, drawn without replacement; float64 [prompts].

    `rewards`: [prompts, n], any reals. In ascending order, the i-th (from 1) is the best of comb(i - 1, k - 1) of the
    comb(n, k) choices. ValueError for k outside 1..n.
    """
    n = rewards.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"the best of {k} cannot be told from {n} responses")
    weights = np.array([comb(i - 1, k - 1) / comb(n, k) for i in range(1, n + 1)])
    return np.sort(rewards.astype(np.float64), axis=1) @ weights


def worst_at_k(rewards: np.ndarray, k: int) -> np.ndarray:
    """Expected reward of the worst of k responses; otherwise as `best_at_k`."""
    return -best_at_k(-rewards.astype(np.float64), k)


def pass_at_k(right: np.ndarray, k: int) -> np.ndarray:
    """Chance that one of k responses at least is right; float64 [prompts].

    `right`: bool [prompts, n]. With c right ones of a prompt's n it is 1 - comb(n - c, k) / comb(n, k), the unbiased
    estimator of Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), equation 1: the
    best of k where right is 1 and wrong is 0.
    """
    return best_at_k(right.astype(np.float64), k)


def majority_at_k(rewards: np.ndarray, votes: Sequence[Sequence[str | None]], k: int, *, seed: int = 0) -> np.ndarray:
    """Expected reward of the answer that most of k responses give; float64 [prompts].

    `rewards`: [prompts, n]; `votes`: the answer of each response, None where it gives none and has no vote. This is
    self-consistency (Wang et al., arXiv 2203.11171): the answer with the most votes wins, and gets the mean reward of
    the prompt's responses that give it. Of several with as many votes each gets its share of the trial; where nobody
    votes, that is the mean reward of the k. Means over all choices of k, or over `MAJORITY_TRIALS` that are drawn from
    `seed`, the same for each prompt.
    """
    trials = _trials(rewards.shape[1], k, seed)
    return np.array(
        [_majority(reward, vote, trials) for reward, vote in zip(rewards.astype(np.float64), votes, strict=True)]
    )


def _trials(n: int, k: int, seed: int) -> np.ndarray:
    """Choices of k out of n: bool [trials, n]."""
    if not 1 <= k <= n:
        raise ValueError(f"the majority of {k} cannot be told from {n} responses")
    chosen: Sequence[Sequence[int]] | np.ndarray
    if comb(n, k) <= MAJORITY_TRIALS:
        chosen = list(combinations(range(n), k))
    else:
        draws = np.random.default_rng(seed).random((MAJORITY_TRIALS, n))
        chosen = draws.argsort(axis=1)[:, :k]
    trials = np.zeros((len(chosen), n), dtype=bool)
    np.put_along_axis(trials, np.asarray(chosen), values=True, axis=1)
    return trials


def _majority(rewards: np.ndarray, votes: Sequence[str | None], trials: np.ndarray) -> float:
    """One prompt's mean over `trials`; `rewards` [n]."""
    answers = list(dict.fromkeys(vote for vote in votes if vote is not None))
    nobody = (trials @ rewards) / trials.sum(axis=1)
    if not answers:
        return float(nobody.mean())
    given = np.array([[vote == answer for answer in answers] for vote in votes], dtype=np.float64)
    worth = rewards @ given / given.sum(axis=0)
    counts = trials.astype(np.float64) @ given
    most = counts.max(axis=1, keepdims=True)
    won = (counts == most) & (most > 0)
    shared = won @ worth / np.maximum(won.sum(axis=1), 1)
    return float(np.where(most[:, 0] > 0, shared, nobody).mean())
