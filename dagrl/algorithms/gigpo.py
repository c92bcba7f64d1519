"""Group-in-group policy optimization: advantages of episodes, and of steps from the same state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from dagrl.algorithms.advantages import grpo_advantages
from dagrl.data.batch import Column


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the policy."""

    row: int
    begin: int
    """Index of its first token among the tokens of all rows."""
    end: int
    state: bytes
    """Tokens between the previous turn of the policy and this one: equal tokens are the same state of a group."""


def gigpo_advantages(
    rewards: np.ndarray,
    groups: np.ndarray,
    mask: Column,
    *,
    turn_rewards: Column,
    prompts: Column,
    tokens: Column,
    turns: Column,
    discount: float,
    step_coef: float,
    normalize_by_std: bool = True,
    mean_over: Literal["responses", "turns"] = "responses",
) -> Column:
    """A = A_episode + w A_step (GiGPO, arXiv 2505.10978, equations 3 and 6 to 8).

    A_episode are the advantages of `grpo_advantages`, as in the paper. With `mean_over` ``turns``, a response counts
    once for each of its turns in its group, as in verl-agent and ROLL. For A_step, the turns of a group that begin in
    the same state are compared with each other in the same way, by their returns R_t = sum over k >= t of discount^(k -
    t) r_k. The state is the tokens since the previous turn of the policy: the paper's anchor state. A state that occurs
    once has A_step 0.

    `turn_rewards` has the reward of a turn on any of its tokens; `prompts` has the tokens before the policy's first
    turn, which may differ within a group of agents; `turns` has the number of each token's turn from 1, and 0 for
    tokens that others wrote; `step_coef` is w. All but `prompts` are ragged as `mask`. Other arguments, result and
    errors are as in `grpo_advantages`.
    """
    episode = grpo_advantages(rewards, groups, mask, normalize_by_std=normalize_by_std)
    steps = steps_of(prompts, tokens, turns)
    if not steps:
        return episode
    states: dict[tuple[int, bytes], int] = {}
    anchors = np.array([states.setdefault((int(groups[step.row]), step.state), len(states)) for step in steps])
    one_each = Column(np.ones(len(steps), dtype=np.float32), np.arange(len(steps) + 1))
    returns = _returns(steps, turn_rewards, discount)
    compared = grpo_advantages(returns, anchors, one_each, normalize_by_std=normalize_by_std)
    rows = [step.row for step in steps]
    of_rows = grpo_advantages(rewards[rows], groups[rows], one_each, normalize_by_std=normalize_by_std)
    values = episode.values.astype(np.float64)
    for step, whole, advantage in zip(steps, of_rows.values.tolist(), compared.values.tolist(), strict=True):
        span = slice(step.begin, step.end)
        values[span] = (whole if mean_over == "turns" else values[span]) + step_coef * advantage
    return Column(np.where(mask.values > 0, values, 0.0).astype(np.float32), mask.offsets)


def steps_of(prompts: Column, tokens: Column, turns: Column) -> list[Step]:
    """The turns of all rows, in order."""
    assert turns.offsets is not None
    steps = []
    for row, (first, last) in enumerate(zip(turns.offsets[:-1].tolist(), turns.offsets[1:].tolist(), strict=True)):
        numbers = turns.values[first:last]
        borders = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        since, before = first, prompts[row]
        for begin, end in pairwise(borders):
            if begin < end and numbers[begin]:
                state = np.concatenate([before, tokens.values[since : first + begin]]).astype(np.int64).tobytes()
                steps.append(Step(row, first + begin, first + end, state))
                since, before = first + end, prompts[row][:0]
    return steps


def _returns(steps: Sequence[Step], token_rewards: Column, discount: float) -> np.ndarray:
    """Discounted sum of the rewards of each step and the later ones of its row, float64 [steps]."""
    returns = np.zeros(len(steps))
    for place in range(len(steps) - 1, -1, -1):
        step = steps[place]
        returns[place] = token_rewards.values[step.begin : step.end].sum(dtype=np.float64)
        if place + 1 < len(steps) and steps[place + 1].row == step.row:
            returns[place] += discount * returns[place + 1]
    return returns
