"""``reward``: scores each response with a function of its text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dagrl.config.reward_names import BUILT_IN_REWARDS
from dagrl.config.schema import NodeBase, RewardNode, SourceReward
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.response import passages, response_text
from dagrl.ops.trajectories import first_rows
from dagrl.plugins.custom import load_function
from dagrl.rewards.score import RewardScores, Samples, score


def reward(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield the rewards of each shard. Raises RewardError if the function fails and ``on_error`` is stop."""
    node = context.declared(RewardNode)
    for part in parts:
        scores = _scores(first_rows(part.batch, context), node, context)
        rewards = np.repeat(scores.rewards, context.sequences)
        stats = reward_stats(node, scores.rewards)
        if node.on_error != "stop":
            numbers = np.arange(len(scores.rewards))
            stats["reward/failed_fraction"] = Stat.of(numbers < scores.failures)
            stats["failed/reward"] = Stat.of(numbers < scores.unavailable)
        stats |= _further_stats(scores.further, node.written_as("reward"))
        columns = {"reward": Column(rewards)}
        if "reward_info" in node.contract().writes:
            texts = [json.dumps(info) for info in scores.further for _ in range(context.sequences)]
            columns["reward_info"] = Column.text(texts)
        yield Output((part.index,), part.batch.rows, columns, stats)


def _scores(batch: Batch, node: RewardNode, context: Context) -> RewardScores:
    if not node.by_source:
        return _scored(batch, node.functions[None], node, context)
    names = batch["data_set"].strings()
    functions = [name if name in node.by_source else None for name in names]
    rewards, failures, unavailable = np.zeros(len(batch), dtype=np.float32), 0, 0
    further: list[Mapping[str, float | str]] = [{}] * len(batch)
    for name in dict.fromkeys(functions):
        if name not in node.functions:
            raise ValueError(
                f"the source `{names[functions.index(name)]}` has no reward; add `fn`, or it to `by_source`"
            )
        rows = np.array([row for row, other in enumerate(functions) if other == name])
        scores = _scored(batch.take(rows), node.functions[name], node, context)
        rewards[rows] = scores.rewards
        failures += scores.failures
        unavailable += scores.unavailable
        for row, numbers in zip(rows.tolist(), scores.further, strict=True):
            further[row] = numbers
    return RewardScores(rewards, failures, unavailable, further)


def _scored(batch: Batch, own: SourceReward, node: RewardNode, context: Context) -> RewardScores:
    resources = context.resources
    function = resources.once(
        f"reward {own.fn}", lambda: load_function(BUILT_IN_REWARDS.get(own.fn, own.fn), resources.folder)
    )
    samples = _samples(batch, context)
    return score(function, samples, args=own.args, on_error=node.on_error, concurrency=node.concurrency)


def reward_stats(node: NodeBase, rewards: np.ndarray) -> dict[str, Stat]:
    """The mean of a node's rewards, unless it writes ``reward``, which `samples` reports after other nodes."""
    column = node.written_as("reward")
    return {} if column == "reward" else {f"reward/{column}": Stat.of(rewards)}


def _further_stats(further: Sequence[Mapping[str, float | str]], column: str) -> dict[str, Stat]:
    numbers: dict[str, list[float]] = {}
    for info in further:
        for name, value in info.items():
            if not isinstance(value, str):
                numbers.setdefault(name, []).append(value)
    return {f"{column}_info/{name}": Stat.of(values) for name, values in numbers.items()}


def _samples(batch: Batch, context: Context) -> Samples:
    tokenizer = context.resources.tokenizer
    prompts = [tokenizer.decode(batch["prompt_tokens"][row], skip_special_tokens=True) for row in range(len(batch))]
    agent_rewards = batch["agent_reward"].values.tolist() if "agent_reward" in batch else []
    return Samples(
        sample_id=batch.rows.tolist(),
        prompt=prompts,
        response=[scored_text(batch, row, context) for row in range(len(batch))],
        answer=batch["answer"].strings(),
        data_source=batch["data_source"].strings(),
        extra_info=[json.loads(text) for text in batch["extra_info"].strings()],
        finish_reason=batch["finish_reason"].strings() if "finish_reason" in batch else (),
        **_turns(batch, context),
        agent_reward=[None if math.isnan(given) else given for given in agent_rewards],
    )


def _turns(batch: Batch, context: Context) -> dict[str, Any]:
    if "token_turn" not in batch:
        return {}
    own = [[passage for passage in passages(batch, row) if passage.turn] for row in range(len(batch))]
    return {
        "turns": [[response_text(turn.tokens, context) for turn in turns] for turns in own],
        "turn_rewards": [[turn.reward for turn in turns] for turns in own] if "token_reward" in batch else [],
    }


def scored_text(batch: Batch, row: int, context: Context) -> str:
    """The text to score: the response, or its last passage in a multi-turn rollout."""
    if "token_turn" not in batch:
        return response_text(batch["response_tokens"][row], context)
    said = passages(batch, row)
    return response_text(said[-1].tokens, context) if said else ""
