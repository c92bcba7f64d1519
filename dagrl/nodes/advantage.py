"""``advantage``: rewards become advantages, compared within groups or over the whole batch."""

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
)
from dagrl.algorithms.reward_shaping import cosine_rewards, kl_charges, length_rewards, overlong_penalty
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.nodes.base import Context, Output, Part
from dagrl.spec.schema import AdvantageNode


def advantage(parts: Sequence[Part], context: Context) -> Iterator[Output]:
    """Yield the advantages of each part: a shard, which holds whole groups, or the batch where it is whitened."""
    node = context.node
    assert isinstance(node, AdvantageNode)
    for part in parts:
        batch = part.batch
        rewards, stats = shaped_rewards(node, batch, longest=context.sampling.max_new_tokens)
        charges = None
        if (charge := node.kl_in_reward) is not None:
            logprobs = batch["old_logprob"], batch["ref_logprob"]
            charges = kl_charges(*logprobs, batch["response_mask"], coef=charge.coef, estimator=charge.estimator)
            stats["kl/in_reward"] = Stat.of(row_sums(charges))
        yield Output((part.index,), batch.rows, {"advantage": _estimate(node, batch, rewards, charges)}, stats)


def shaped_rewards(node: AdvantageNode, batch: Batch, *, longest: int) -> tuple[np.ndarray, dict[str, Stat]]:
    """The rewards, float64 [S], with all that the node says about lengths, and what that came to."""
    rewards = batch["reward"].values.astype(np.float64)
    lengths = batch["response_mask"].lengths
    stats: dict[str, Stat] = {}
    if (cosine := node.cosine_reward) is not None:
        rewards = cosine_rewards(
            rewards > cosine.right_above,
            lengths,
            longest=longest,
            right_from_to=cosine.right,
            wrong_from_to=cosine.wrong,
            exceeded=cosine.exceeded,
        )
        stats["reward/cosine"] = Stat.of(rewards)
    points = np.zeros(len(rewards))
    if (shorter := node.length_reward) is not None:
        right = batch["reward"].values > shorter.right_above
        given = shorter.coef * length_rewards(right, lengths, batch["group_id"].values)
        stats["reward/length"] = Stat.of(given)
        points += given
    if (buffer := node.overlong_buffer) is not None:
        penalty = overlong_penalty(lengths, longest=longest, buffer=buffer.len, factor=buffer.penalty_factor)
        stats["reward/overlong"] = Stat.of(penalty)
        points += penalty
    return rewards + points, stats


def _estimate(node: AdvantageNode, batch: Batch, rewards: np.ndarray, charges: Column | None) -> Column:
    mask = batch["response_mask"]
    if node.estimator == "reinforce_plus_plus":
        return reinforce_plus_plus_advantages(rewards, mask, charges)
    if charges is not None:
        rewards = rewards - row_sums(charges)
    if node.estimator == "remax":
        return remax_advantages(rewards, batch["baseline_reward"].values, mask)
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
        case "reinforce_plus_plus_baseline":
            return reinforce_plus_plus_baseline_advantages(rewards, groups, mask)
    raise AssertionError(f"no estimator {node.estimator!r}")
