"""``covariance``: marks the few tokens that an update clips, penalises or masks (Clip-Cov, KL-Cov, M2PO, high-entropy
tokens).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagrl.algorithms.covariance import below_quantile, beyond_moment, covariances, drawn, highest, squared_log_ratios
from dagrl.config.schema import CovarianceNode
from dagrl.data.batch import Column
from dagrl.data.stats import Stat
from dagrl.ops.base import Context, OpInput, Output

_STREAM = 0xC0
"""Separates this random stream from others with the same seed."""


def covariance(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    node = context.declared(CovarianceNode)
    for part in parts:
        # Sorted by row, so that the draw does not depend on the order of arrival.
        order = np.argsort(part.batch.rows)
        batch = part.batch.take(order)
        mask = batch["response_mask"]
        if "is_expert" in batch:
            own = np.repeat(batch["is_expert"].values == 0, mask.lengths)
            mask = Column(mask.values * own.astype(mask.values.dtype), mask.offsets)
        counted = mask.values > 0
        if node.second_moment is not None:
            squares = squared_log_ratios(batch["old_logprob"], batch["rollout_logprob"], batch["advantage"], mask)
            chosen = beyond_moment(squares, node.second_moment)
            stats = {"covariance/second_moment": Stat.of(squares[squares > 0])}
        elif node.top_entropy is not None:
            chosen = below_quantile(batch["entropy"], mask, node.top_entropy)
            stats = {"covariance/entropy": Stat.of(batch["entropy"].values[counted])}
        else:
            shares = covariances(batch["old_logprob"], batch["advantage"], mask)
            chosen = _chosen(shares, mask, node, context)
            stats = {"covariance/mean": Stat.of(shares[counted])}
        stats["covariance/held_back_fraction"] = Stat.of(chosen[counted])
        marks = Column(chosen.astype(np.float32), mask.offsets).take(np.argsort(order))
        yield Output((part.index,), part.batch.rows, {"clip_cov_mask": marks}, stats)


def _chosen(shares: np.ndarray, mask: Column, node: CovarianceNode, context: Context) -> np.ndarray:
    if node.between is None:
        return highest(shares, mask, node.share)
    seed = [context.pipeline.run.seed % 2**64, context.step, _STREAM]
    random = np.random.default_rng(np.random.SeedSequence(seed))
    lower, upper = node.between
    return drawn(shares, mask, node.share, lower=lower, upper=upper, random=random)
