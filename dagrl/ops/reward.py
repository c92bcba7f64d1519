"""``reward``: scores each response with a function of its text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dagrl.config.reward_names import BUILT_IN_REWARDS
from dagrl.config.schema import NodeBase, RewardNode
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.response import passages
from dagrl.ops.response_text import response_text
from dagrl.ops.trajectories import first_rows
from dagrl.plugins.custom import load_function
from dagrl.rewards.score import Samples, score


def reward(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield the rewards of each shard. Raises RewardError if the function fails and ``on_error`` is stop."""
    node = context.declared(RewardNode)
    resources = context.resources
    function = resources.once(
        f"reward {node.fn}", lambda: load_function(BUILT_IN_REWARDS.get(node.fn, node.fn), resources.folder)
    )
    for part in parts:
        scored = _samples(first_rows(part.batch, context), context)
        scores = score(function, scored, args=node.args, on_error=node.on_error, concurrency=node.concurrency)
        rewards = np.repeat(scores.rewards, context.sequences)
        stats = reward_stats(node, scores.rewards)
        if node.on_error != "stop":
            stats["reward/failed_fraction"] = Stat.of(np.arange(len(scores.rewards)) < scores.failures)
        stats |= _further_stats(scores.further, node.written_as("reward"))
        columns = {"reward": Column(rewards)}
        if "reward_info" in node.contract().writes:
            texts = [json.dumps(each) for each in scores.further for _ in range(context.sequences)]
            columns["reward_info"] = Column.text(texts)
        yield Output((part.index,), part.batch.rows, columns, stats)


def reward_stats(node: NodeBase, rewards: np.ndarray) -> dict[str, Stat]:
    """The mean of a node's rewards, unless it writes ``reward``, which `samples` reports after other nodes."""
    column = node.written_as("reward")
    return {} if column == "reward" else {f"reward/{column}": Stat.of(rewards)}


def _further_stats(further: Sequence[Mapping[str, float]], column: str) -> dict[str, Stat]:
    """Metrics of the further numbers, over the samples that have them."""
    names = dict.fromkeys(name for numbers in further for name in numbers)
    return {
        f"{column}_info/{name}": Stat.of([numbers[name] for numbers in further if name in numbers]) for name in names
    }


def _samples(batch: Batch, context: Context) -> Samples:
    """The rows in the form that reward functions receive."""
    tokenizer = context.resources.tokenizer
    prompts = [tokenizer.decode(batch["prompt_tokens"][row], skip_special_tokens=True) for row in range(len(batch))]
    return Samples(
        sample_id=batch.rows.tolist(),
        prompt=prompts,
        response=[scored_text(batch, row, context) for row in range(len(batch))],
        answer=batch["answer"].strings(),
        data_source=batch["data_source"].strings(),
        extra_info=[json.loads(text) for text in batch["extra_info"].strings()],
        finish_reason=batch["finish_reason"].strings() if "finish_reason" in batch else (),
        **_turns(batch, context),
        agent_reward=_agent_rewards(batch),
    )


def _turns(batch: Batch, context: Context) -> dict[str, Any]:
    """Texts and rewards of the policy's turns, in a multi-turn rollout."""
    if "token_turn" not in batch:
        return {}
    own = [[each for each in passages(batch, row) if each.turn] for row in range(len(batch))]
    return {
        "turns": [[response_text(each.tokens, context) for each in turns] for turns in own],
        "turn_rewards": [[each.reward for each in turns] for turns in own] if "token_reward" in batch else [],
    }


def _agent_rewards(batch: Batch) -> list[float | None]:
    """Rewards of agents; none without an agent."""
    given = batch["agent_reward"].values.tolist() if "agent_reward" in batch else []
    return [None if math.isnan(reward) else reward for reward in given]


def scored_text(batch: Batch, row: int, context: Context) -> str:
    """The text to score: the response, or its last passage in a multi-turn rollout."""
    if "token_turn" not in batch:
        return response_text(batch["response_tokens"][row], context)
    said = passages(batch, row)
    return response_text(said[-1].tokens, context) if said else ""
