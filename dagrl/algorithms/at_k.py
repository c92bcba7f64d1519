"""Unbiased ``pass@k``, ``best@k``, ``worst@k`` and ``maj@k`` from n >= k responses per prompt.

Each figure is the mean over all choices of k of the n responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb

import numpy as np

from dagrl.config.schema.val_metrics import ks_of

MAJORITY_TRIALS = 256
"""Number of choices of k responses that ``maj@k`` samples, if there are more."""


def figures_at_k(
    rewards: np.ndarray, measured: np.ndarray, votes: Sequence[Sequence[str | None]] | None, pass_reward: float
) -> dict[str, np.ndarray]:
    """The metrics of a validation by name, one value for each prompt: float64 [prompts].

    `rewards`, and bool `measured`, which leaves responses out: [prompts, n]. A prompt with fewer than k measured
    responses has NaN. A reward of `pass_reward` or more is right.
    """
    n, counts = rewards.shape[1], measured.sum(axis=1)
    figures: dict[str, np.ndarray] = {}
    # Prompts with all responses first, for the usual order of names.
    for count in sorted(set(counts[counts > 0].tolist()), reverse=True):
        mine = np.flatnonzero(counts == count)
        kept = rewards[mine][measured[mine]].reshape(len(mine), count)
        given = votes and [[votes[row][place] for place in np.flatnonzero(measured[row])] for row in mine.tolist()]
        for name, values in _figures(kept, given, pass_reward, n):
            figures.setdefault(name, np.full(len(rewards), np.nan))[mine] = values
    return figures


def _figures(
    rewards: np.ndarray, votes: Sequence[Sequence[str | None]] | None, pass_reward: float, n: int
) -> Iterator[tuple[str, np.ndarray]]:
    ks = [k for k in ks_of(n) if k <= rewards.shape[1]]
    yield f"mean@{n}", rewards.mean(axis=1)
    for k in ks:
        yield f"pass@{k}", pass_at_k(rewards >= pass_reward, k)
    if n == 1:
        return
    yield f"std@{n}", rewards.std(axis=1)
    for k in ks[1:]:
        yield f"best@{k}", best_at_k(rewards, k)
        yield f"worst@{k}", worst_at_k(rewards, k)
        if votes:
            yield f"maj@{k}", majority_at_k(rewards, votes, k)


def best_at_k(rewards: np.ndarray, k: int) -> np.ndarray:
    """Expected reward of the best of k responses, drawn without replacement; float64 [prompts].

    `rewards`: [prompts, n], any reals. In ascending order, the i-th (from 1) is the best of comb(i - 1, k - 1) of the
    comb(n, k) choices. ValueError for k outside 1..n.
    """
    n = rewards.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"cannot compute the best of {k} from {n} responses")
    weights = np.array([comb(i - 1, k - 1) / comb(n, k) for i in range(1, n + 1)])
    return np.sort(rewards.astype(np.float64), axis=1) @ weights


def worst_at_k(rewards: np.ndarray, k: int) -> np.ndarray:
    """Expected reward of the worst of k responses; otherwise as `best_at_k`."""
    return -best_at_k(-rewards.astype(np.float64), k)


def pass_at_k(right: np.ndarray, k: int) -> np.ndarray:
    """Probability that at least one of k responses is right; float64 [prompts].

    `right`: bool [prompts, n]. With c right responses out of n it is 1 - comb(n - c, k) / comb(n, k), the unbiased
    estimator of Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), equation 1.
    """
    return best_at_k(right.astype(np.float64), k)


def majority_at_k(rewards: np.ndarray, votes: Sequence[Sequence[str | None]], k: int) -> np.ndarray:
    """Expected reward of the majority answer of k responses; float64 [prompts].

    `rewards`: [prompts, n]; `votes`: the answer of each response; None does not vote. This is self-consistency (Wang et
    al., arXiv 2203.11171): the answer with the most votes wins and scores the mean reward of the prompt's responses
    that give it. Ties are shared equally; without any votes, the score is the mean reward of the k. The mean is over
    all choices of k, or over `MAJORITY_TRIALS` drawn at random, the same ones for each prompt.
    """
    trials = _trials(rewards.shape[1], k)
    return np.array(
        [_majority(reward, vote, trials) for reward, vote in zip(rewards.astype(np.float64), votes, strict=True)]
    )


def _trials(n: int, k: int) -> np.ndarray:
    if not 1 <= k <= n:
        raise ValueError(f"cannot compute the majority of {k} from {n} responses")
    chosen: Sequence[Sequence[int]] | np.ndarray
    if comb(n, k) <= MAJORITY_TRIALS:
        chosen = list(combinations(range(n), k))
    else:
        draws = np.random.default_rng(0).random((MAJORITY_TRIALS, n))
        chosen = draws.argsort(axis=1)[:, :k]
    trials = np.zeros((len(chosen), n), dtype=bool)
    np.put_along_axis(trials, np.asarray(chosen), values=True, axis=1)
    return trials


def _majority(rewards: np.ndarray, votes: Sequence[str | None], trials: np.ndarray) -> float:
    """Mean over `trials` for one prompt; `rewards` [n]."""
    answers = list(dict.fromkeys(vote for vote in votes if vote is not None))
    without_votes = (trials @ rewards) / trials.sum(axis=1)
    if not answers:
        return float(without_votes.mean())
    given = np.array([[vote == answer for answer in answers] for vote in votes], dtype=np.float64)
    worth = rewards @ given / given.sum(axis=0)
    counts = trials.astype(np.float64) @ given
    most = counts.max(axis=1, keepdims=True)
    won = (counts == most) & (most > 0)
    shared = won @ worth / np.maximum(won.sum(axis=1), 1)
    return float(np.where(most[:, 0] > 0, shared, without_votes).mean())
