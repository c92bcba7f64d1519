"""``advantage``: rewards become advantages, group by group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dagrl.algorithms.advantages import grpo_advantages, kl_charged_rewards
from dagrl.data.stats import Stat
from dagrl.nodes.base import Context, Output, Part
from dagrl.spec.schema import AdvantageNode


def advantage(parts: Sequence[Part], context: Context) -> Iterator[Output]:
    """Yield the advantages of each shard, which holds whole groups."""
    node = context.node
    assert isinstance(node, AdvantageNode)
    for part in parts:
        batch = part.batch
        stats: dict[str, Stat] = {}
        rewards = batch["reward"].values
        if (charge := node.kl_in_reward) is not None:
            logprobs = batch["old_logprob"], batch["ref_logprob"]
            charged = kl_charged_rewards(
                rewards, *logprobs, batch["response_mask"], coef=charge.coef, estimator=charge.estimator
            )
            stats["kl/in_reward"] = Stat.of(rewards - charged)
            rewards = charged
        column = grpo_advantages(
            rewards, batch["group_id"].values, batch["response_mask"], normalize_by_std=node.normalize_by_std
        )
        yield Output((part.index,), batch.rows, {"advantage": column}, stats)
