"""Weights that turn token losses into one number, normalized over the global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dagrl.algorithms.rows import RowReducer
from dagrl.data.batch import Column

if TYPE_CHECKING:
    from dagrl.config.schema import Aggregation


def token_weights(
    mask: Column, aggregation: Aggregation, longest_response: int | None = None, shares: np.ndarray | None = None
) -> tuple[Column, float]:
    """Weight of each token, float32 and ragged as `mask`, and these rows' share of the normalizer.

    ======================= ============================ ===============
    aggregation             weight of a token            normalizer
    ======================= ============================ ===============
    token-mean              its mask                     sum of the mask
    seq-mean-token-sum      its mask                     responses
    seq-mean-token-mean     its mask / its row's sum     responses
    seq-mean-token-sum-norm its mask / longest_response  responses
    ======================= ============================ ===============

    token-mean is from DAPO (arXiv 2503.14476, section 3.3), seq-mean-token-mean from GRPO (arXiv 2402.03300, eq. 3);
    seq-mean-token-sum has no length bias, and seq-mean-token-sum-norm is the same up to Dr. GRPO's constant in place of
    the length (arXiv 2503.20783). Responses without trained tokens do not count.

    `shares`, float [rows], are the rows' fractions of trajectories with several rows: a trajectory counts as one
    response with the tokens of all its rows.
    """
    values = mask.values.astype(np.float64)
    row = np.repeat(np.arange(len(mask)), mask.lengths)
    row_sums = np.bincount(row, values, minlength=len(mask))
    parts = np.ones(len(mask)) if shares is None else shares.astype(np.float64)
    responses = float(parts[row_sums > 0].sum())
    match aggregation:
        case "token-mean":
            weights, normalizer = values, float(values.sum())
        case "seq-mean-token-sum":
            weights, normalizer = values, responses
        case "seq-mean-token-mean":
            weights, normalizer = values * (parts / np.where(row_sums > 0, row_sums, 1.0))[row], responses
        case "seq-mean-token-sum-norm":
            assert longest_response
            weights, normalizer = values / longest_response, responses
    return Column(weights.astype(np.float32), mask.offsets), normalizer


def batch_parts(
    weight: torch.Tensor,
    rows: RowReducer,
    aggregation: Aggregation,
    longest_response: int | None = None,
    share: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token's part of its mini-batch [T].

    Parts add up to 1, for any sum of the weights. Metrics of the loss count mini-batches by them: total / parts is then
    the optimised number, and several mini-batches are averaged. `weight` [T] is the weight of `token_weights` over the
    normalizer, for masks of 0 and 1; `share` [S] are the rows' parts of trajectories.
    """
    if aggregation in ("token-mean", "seq-mean-token-mean"):
        return weight
    # The tokens of a response have equal weights, so one of them represents it.
    part = rows.largest(weight) if share is None else rows.largest(weight) * share[rows.row]
    if aggregation == "seq-mean-token-sum-norm":
        assert longest_response
        part = part * longest_response
    return torch.where(rows.once, part, 0.0)
