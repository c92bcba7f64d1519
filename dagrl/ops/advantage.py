"""``advantage``: turns rewards into advantages, within groups or over the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagrl.algorithms.advantages import row_sums, trained_tokens, whitened
from dagrl.algorithms.distillation import distilled_advantages
from dagrl.algorithms.reward_shaping import cosine_rewards, kl_charges, length_rewards, overlong_penalty
from dagrl.config.schema import AdvantageDistillationSpec, AdvantageNode, KlInRewardSpec
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.estimators import WHITENED, EstimatorInputs, estimate
from dagrl.ops.trajectories import for_all_rows, joined_rows, own_rows, split_rows, with_lengths
from dagrl.ops.work import AdvantageWork


def advantage(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield the advantages of each part: a shard of whole groups, or the whole batch if the estimator whitens it."""
    node = context.declared(AdvantageNode)
    for part in parts:
        # Responses of an expert are not samples of the policy, so they are not part of any baseline.
        joined = joined_rows(part.batch, context)
        batch = own_rows(with_lengths(joined, part.batch, context))
        longest = np.array([sampling.max_new_tokens for sampling in context.sampling_of_rows(batch)])
        rewards, stats = shaped_rewards(node, batch, longest=longest)
        charges = None
        if node.kl_in_reward is not None:
            charges = _charged(node.kl_in_reward, batch, context, stats)
        columns = estimate(EstimatorInputs(node, batch, rewards, charges, context, stats))
        if node.distillation is not None:
            columns["advantage"] = _distilled(columns["advantage"], node.distillation, batch, stats)
        if node.estimator in WHITENED:
            columns["advantage"] = whitened(columns["advantage"], batch["response_mask"])
        if "return" in columns:
            stats["returns/mean"] = Stat.of(columns["return"].values[batch["response_mask"].values > 0])
        spread = split_rows(for_all_rows(columns, batch, joined), part.batch)
        yield Output((part.index,), part.batch.rows, spread, stats)


def shaped_rewards(node: AdvantageNode, batch: Batch, *, longest: np.ndarray) -> tuple[np.ndarray, dict[str, Stat]]:
    """Rewards with all length terms of the node, float64 [S], and statistics of the terms.

    `longest`, int64 [S], bounds one row: terms that compare with it take a trajectory's longest one.
    """
    if node.estimator in ("none", "gdpo"):  # These estimators do not read ``reward``.
        return np.zeros(len(batch)), {}
    rewards = batch["reward"].values.astype(np.float64)
    longest_rows = batch["longest_row"].values
    stats: dict[str, Stat] = {}
    if (cosine := node.cosine_reward) is not None:
        rewards = cosine_rewards(
            rewards > cosine.right_above,
            longest_rows,
            longest=longest,
            right_from_to=cosine.right,
            wrong_from_to=cosine.wrong,
            exceeded=cosine.exceeded,
        )
        stats["reward/cosine"] = Stat.of(rewards)
    points = np.zeros(len(rewards))
    if (shorter := node.length_reward) is not None:
        right = batch["reward"].values > shorter.right_above
        given = shorter.coef * length_rewards(right, batch["length"].values, batch["group_id"].values)
        stats["reward/length"] = Stat.of(given)
        points += given
    if (buffer := node.overlong_buffer) is not None:
        penalty = overlong_penalty(longest_rows, longest=longest, buffer=buffer.len, factor=buffer.penalty_factor)
        stats["reward/overlong"] = Stat.of(penalty)
        points += penalty
    return rewards + points, stats


def _charged(spec: KlInRewardSpec, batch: Batch, context: Context, stats: dict[str, Stat]) -> Column:
    """KL penalties of tokens, ragged as the response mask. Adds their statistics to `stats`."""
    mask, work = batch["response_mask"], context.work_as(AdvantageWork)
    weight = spec.coef if work.kl_weight is None else work.kl_weight
    logprobs = batch["old_logprob"], batch["ref_logprob"]
    charges, clipped = kl_charges(*logprobs, mask, coef=weight, estimator=spec.estimator)
    stats["kl/in_reward"] = Stat.of(row_sums(charges))
    if spec.estimator == "k3":
        stats["kl/in_reward_clip_fraction"] = Stat.of(clipped[mask.values > 0])
    if spec.target_kl is not None:
        stats |= _steered(charges, mask, weight)
    return charges


def _distilled(advantages: Column, spec: AdvantageDistillationSpec, batch: Batch, stats: dict[str, Stat]) -> Column:
    """The advantages plus the distillation term. Adds statistics to `stats`."""
    taught = batch["teacher_mask"].values if "teacher_mask" in batch else None
    logprobs = batch["teacher_logprob"], batch["old_logprob"]
    preferred, apart = distilled_advantages(*logprobs, batch["response_mask"], spec, taught)
    stats["distillation/kl"] = Stat.of(apart)
    return Column((advantages.values + preferred.values).astype(np.float32), advantages.offsets)


def _steered(charges: Column, mask: Column, weight: float) -> dict[str, Stat]:
    tokens = trained_tokens(mask)
    trained = tokens > 0
    divergence = row_sums(charges)[trained] / tokens[trained] / weight
    return {"kl/reward_divergence": Stat.of(divergence), "kl/reward_weight": Stat.of([weight])}
