"""A response of several turns, read again: which of its tokens are whose."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dagrl.data.batch import Batch


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens that one side has said in one go."""

    tokens: np.ndarray
    """Int64."""
    turn: int
    """Number of the policy's turn, from 1 on; 0 where others have said it."""
    reward: float
    """Of the turn; 0 where nobody rewards turns."""


def passages(batch: Batch, row: int) -> list[Passage]:
    """What a response consists of, in its order. `batch` has ``token_turn``, maybe ``token_reward``."""
    tokens, turns = batch["response_tokens"][row], batch["token_turn"][row]
    rewards = batch["token_reward"][row] if "token_reward" in batch else np.zeros(len(tokens), dtype=np.float32)
    borders = [0, *(np.flatnonzero(np.diff(turns)) + 1).tolist(), len(tokens)]
    return [
        Passage(tokens[begin:end], int(turns[begin]), float(rewards[begin:end].sum()))
        for begin, end in pairwise(borders)
        if begin < end
    ]
