"""Discounted returns of turns, in float64 numpy."""

from __future__ import annotations

import numpy as np

from dagrl.data.batch import Column


def turn_returns(token_rewards: Column, mask: Column, *, discount: float) -> Column:
    """The return of each turn on all of its tokens: R_k = r_k + discount R_(k + 1), before `whitened`.

    As ROLL's ``agentic_reinforce``, which takes the reward on a turn's last token alone. A turn is an unbroken run of
    tokens in the mask, and r_k the sum of the rewards on them; after the last turn of a row R is 0.

    `token_rewards` is ragged as `mask`. Returns float64, ragged as `mask` and 0 where it is 0.
    """
    in_turn = mask.values > 0
    row = np.repeat(np.arange(len(mask)), mask.lengths)
    follows = np.concatenate([[False], in_turn[:-1] & (row[1:] == row[:-1])])[: len(row)]
    begins = np.flatnonzero(in_turn & ~follows)
    kept = np.flatnonzero(in_turn)
    turn = np.searchsorted(begins, kept, side="right") - 1
    returns = np.bincount(turn, token_rewards.values[kept], minlength=len(begins))
    for place in range(len(begins) - 2, -1, -1):
        if row[begins[place]] == row[begins[place + 1]]:
            returns[place] += discount * returns[place + 1]
    values = np.zeros(len(row))
    values[kept] = returns[turn]
    return Column(values, mask.offsets)
