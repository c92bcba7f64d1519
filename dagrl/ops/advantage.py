"""``advantage``: turns rewards into advantages, within groups or over the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagrl.algorithms.advantages import (
    gpg_advantages,
    grpo_advantages,
    opmd_advantages,
    opo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
    row_sums,
    trained_tokens,
    whitened,
)
from dagrl.algorithms.gae import gae_advantages, token_rewards
from dagrl.algorithms.gigpo import gigpo_advantages
from dagrl.algorithms.reward_shaping import cosine_rewards, kl_charges, length_rewards, overlong_penalty
from dagrl.config.schema import AdvantageNode
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.own_estimator import own_advantages
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
        if (charge := node.kl_in_reward) is not None:
            logprobs = batch["old_logprob"], batch["ref_logprob"]
            work = context.work_as(AdvantageWork)
            weight = charge.coef if work.kl_weight is None else work.kl_weight
            charges, clipped = kl_charges(*logprobs, batch["response_mask"], coef=weight, estimator=charge.estimator)
            stats["kl/in_reward"] = Stat.of(row_sums(charges))
            if charge.estimator == "k3":
                stats["kl/in_reward_clip_fraction"] = Stat.of(clipped[batch["response_mask"].values > 0])
            if charge.target_kl is not None:
                stats |= _steered(charges, batch["response_mask"], weight)
        if node.estimator == "gae":
            columns = _with_critic(node, batch, rewards, charges)
            stats["returns/mean"] = Stat.of(columns["return"].values[batch["response_mask"].values > 0])
        else:
            columns = {"advantage": _estimate(node, batch, rewards, charges, context)}
        spread = split_rows(for_all_rows(columns, batch, joined), part.batch)
        yield Output((part.index,), part.batch.rows, spread, stats)


def shaped_rewards(node: AdvantageNode, batch: Batch, *, longest: np.ndarray) -> tuple[np.ndarray, dict[str, Stat]]:
    """Rewards with all length terms of the node, float64 [S], and statistics of the terms.

    `longest`, int64 [S], bounds one row: terms that compare with it take a trajectory's longest one.
    """
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


def _with_critic(node: AdvantageNode, batch: Batch, rewards: np.ndarray, charges: Column | None) -> dict[str, Column]:
    """GAE advantages, whitened over the batch, and the returns that the critic is trained towards."""
    mask = batch["response_mask"]
    on_tokens = token_rewards(rewards, mask, placed=batch.columns.get("token_reward"), charges=charges)
    advantages, returns = gae_advantages(on_tokens, batch["value"], mask, discount=node.gamma, trace=node.lam)
    return {"advantage": whitened(advantages.values, mask), "return": returns}


def _steered(charges: Column, mask: Column, weight: float) -> dict[str, Stat]:
    """Statistics for the controller in `dagrl.orchestrator.steps.kl_control`."""
    tokens = trained_tokens(mask)
    trained = tokens > 0
    divergence = row_sums(charges)[trained] / tokens[trained] / weight
    return {"kl/reward_divergence": Stat.of(divergence), "kl/reward_weight": Stat.of([weight])}


def _estimate(
    node: AdvantageNode, batch: Batch, rewards: np.ndarray, charges: Column | None, context: Context
) -> Column:
    mask = batch["response_mask"]
    if node.estimator == "reinforce_plus_plus":
        return reinforce_plus_plus_advantages(rewards, mask, charges)
    if node.estimator == "remax":
        return remax_advantages(rewards, batch["baseline_reward"].values, mask, charges)
    # The other estimators use one reward per response.
    if charges is not None:
        rewards = rewards - row_sums(charges)
    if ":" in node.estimator:
        return own_advantages(node, batch, rewards, context)
    groups = batch["group_id"].values
    match node.estimator:
        case "grpo":
            return grpo_advantages(rewards, groups, mask, normalize_by_std=node.normalize_by_std)
        case "dr_grpo":
            return grpo_advantages(rewards, groups, mask, normalize_by_std=False)
        case "rloo":
            return rloo_advantages(rewards, groups, mask)
        case "opo":
            return opo_advantages(rewards, groups, mask)
        case "opmd":
            return opmd_advantages(rewards, groups, mask, baseline=node.baseline, tau=node.tau)
        case "gpg":
            return gpg_advantages(rewards, groups, mask)
        case "gigpo":
            return gigpo_advantages(
                rewards,
                groups,
                mask,
                token_rewards=token_rewards(rewards, mask, placed=batch.columns.get("token_reward")),
                prompts=batch["prompt_tokens"],
                tokens=batch["response_tokens"],
                turns=batch["token_turn"],
                discount=node.gamma,
                step_coef=node.step_coef,
                normalize_by_std=node.normalize_by_std,
                mean_over=node.mean_over,
            )
        case "reinforce_plus_plus_baseline":
            return reinforce_plus_plus_baseline_advantages(rewards, groups, mask)
    raise AssertionError(f"no estimator {node.estimator!r}")
