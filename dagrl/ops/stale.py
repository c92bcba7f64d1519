"""Samples of weights too old to be trained on: what ``schedule.stale_samples`` has an update do about them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagrl.config.schema import UpdateNode
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.ops.base import Context


def without_stale(batches: Sequence[Batch], version: int, context: Context) -> tuple[Sequence[Batch], dict[str, Stat]]:
    """The batches as weights of policy `version` may train on them, and how old the samples were that came.

    ``staleness`` is of all of them; ``staleness/masked`` or ``staleness/dropped`` counts those that were too old, where
    there can be any. ValueError where the run is to end with the first.
    """
    behind = [version - batch["policy_version"].values for batch in batches]
    stats = {"staleness": Stat.of(np.concatenate(behind))}
    most = _most_behind(context)
    if most is None:
        return batches, stats
    stale = [each > most for each in behind]
    match context.pipeline.schedule.stale_samples:
        case "stop":
            for batch, rows in zip(batches, stale, strict=True):
                _refuse(batch, rows, version, most)
            return batches, stats
        case "drop":
            kept = [
                batch.take(np.flatnonzero(~rows)) if rows.any() else batch
                for batch, rows in zip(batches, stale, strict=True)
            ]
            return kept, stats | {"staleness/dropped": Stat.of(np.concatenate(stale))}
        case "auto" | "mask":
            masked = [_masked(batch, rows) if rows.any() else batch for batch, rows in zip(batches, stale, strict=True)]
            return masked, stats | {"staleness/masked": Stat.of(np.concatenate(stale))}


def _most_behind(context: Context) -> int | None:
    """Versions that a sample may be behind; None where any number is fine: the generator follows somebody else."""
    schedule, rollout, update = context.pipeline.schedule, context.rollout, context.node
    assert isinstance(update, UpdateNode)
    if getattr(context.pipeline.engines[rollout.engine], "weights_from", None) != update.engine:
        return None
    if schedule.stale_samples == "auto" and rollout.partial_rollout:
        return schedule.max_staleness + rollout.partial_rollout_max_age
    return schedule.max_staleness


def _masked(batch: Batch, stale: np.ndarray) -> Batch:
    mask = batch["response_mask"]
    values = mask.values * np.repeat(~stale, mask.lengths).astype(mask.values.dtype)
    return batch.with_columns({"response_mask": Column(values, mask.offsets)})


def _refuse(batch: Batch, stale: np.ndarray, version: int, most: int) -> None:
    for row in np.flatnonzero(stale)[:1]:
        sampled_by = int(batch["policy_version"].values[row])
        raise ValueError(
            f"sample {batch.rows[row]} comes from policy version {sampled_by}, {version - sampled_by} behind the "
            f"weights that would be trained on it, and schedule.max_staleness is {most}; "
            "`schedule.stale_samples: mask` or `drop` goes on without such samples"
        )
