"""Metrics of a validation: ``mean@n``, ``pass@k`` and others over the responses to each prompt, per validation set.

A set whose prompts come from several data sources gets metrics per source as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dagrl.algorithms.at_k import best_at_k, majority_at_k, pass_at_k, worst_at_k
from dagrl.config.schema.val_metrics import ks_of, vote_of
from dagrl.data.batch import Batch
from dagrl.data.stats import Stat
from dagrl.ops.base import Context
from dagrl.ops.reward import scored_text
from dagrl.rewards.votes import load_vote


def validation_stats(batch: Batch, context: Context) -> dict[str, Stat]:
    """Statistics over the prompts of a validation, without the prefix ``val/``.

    `batch` holds the rows of each prompt consecutively. Raises ValueError if the user's ``val_vote`` fails.
    """
    sets = np.array(batch["data_set"].strings())
    stats: dict[str, Stat] = {}
    for name, prefix in context.pipeline.data.val_prefixes.items():
        rows = np.flatnonzero(sets == name)
        if prefix:
            stats[f"{prefix}response_tokens"] = Stat.of(batch["response_tokens"].lengths[rows])
        stats |= _stats_of_set(batch.take(rows), context.pipeline.val_ns[name], prefix, context)
    return stats


def _stats_of_set(batch: Batch, n: int, prefix: str, context: Context) -> dict[str, Stat]:
    """Statistics of a set with `n` rows for each prompt, and of its data sources if there are several."""
    rewards = batch["reward"].values.reshape(-1, n)
    votes = _votes(batch, n, context) if n > 1 else None
    sources = np.array(batch["data_source"].strings())[::n]
    found = {prefix: np.arange(len(sources))}
    several = list(dict.fromkeys(sources.tolist()))
    if len(several) > 1:
        found |= {f"{prefix}{source}/": np.flatnonzero(sources == source) for source in several}
    stats: dict[str, Stat] = {}
    for place, prompts in found.items():
        chosen = [votes[prompt] for prompt in prompts.tolist()] if votes is not None else None
        for metric, values in _at_k(rewards[prompts], chosen, context.pipeline.data.val_pass_reward):
            stats[place + metric] = Stat.of(values)
    return stats


def _votes(batch: Batch, n: int, context: Context) -> list[list[str | None]] | None:
    """Answers of each prompt's `n` responses; None without a way to extract them."""
    vote = vote_of(context.pipeline)
    if vote is None:
        return None
    resources = context.resources
    answer_in = resources.once("val_vote", lambda: load_vote(vote, resources.folder))
    answers = [answer_in(scored_text(batch, row, context)) for row in range(len(batch))]
    return [answers[first : first + n] for first in range(0, len(answers), n)]


def _at_k(
    rewards: np.ndarray, votes: list[list[str | None]] | None, pass_reward: float
) -> Iterator[tuple[str, np.ndarray]]:
    """Metrics by name, one value per prompt. `rewards`: [prompts, n]."""
    n = rewards.shape[1]
    yield f"mean@{n}", rewards.mean(axis=1)
    for k in ks_of(n):
        yield f"pass@{k}", pass_at_k(rewards >= pass_reward, k)
    if n == 1:
        return
    yield f"std@{n}", rewards.std(axis=1)
    for k in ks_of(n)[1:]:
        yield f"best@{k}", best_at_k(rewards, k)
        yield f"worst@{k}", worst_at_k(rewards, k)
        if votes is not None:
            yield f"maj@{k}", majority_at_k(rewards, votes, k)
