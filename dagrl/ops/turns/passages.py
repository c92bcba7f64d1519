"""Splits a multi-turn response into passages of the policy and observations."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dagrl.data.batch import Batch


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive tokens of the policy or of an observation."""

    tokens: np.ndarray
    """Int64."""
    turn: int
    """Number of the policy's turn, from 1; 0 for an observation."""
    reward: float
    """Reward of the turn; 0 if turns are not rewarded."""


def passages(batch: Batch, row: int) -> list[Passage]:
    """Passages of a response in order. `batch` has ``token_turn`` and possibly ``token_reward``."""
    tokens, turns = batch["response_tokens"][row], batch["token_turn"][row]
    rewards = batch["token_reward"][row] if "token_reward" in batch else np.zeros(len(tokens), dtype=np.float32)
    borders = [0, *(np.flatnonzero(np.diff(turns)) + 1).tolist(), len(tokens)]
    return [
        Passage(tokens[begin:end], int(turns[begin]), float(rewards[begin:end].sum()))
        for begin, end in pairwise(borders)
        if begin < end
    ]
