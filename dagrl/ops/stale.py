"""Applies ``schedule.stale_samples`` to samples of weights that are too old to be trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagrl.config.schema import UpdateNode
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.ops.base import Context


def without_stale(batches: Sequence[Batch], version: int, context: Context) -> tuple[Sequence[Batch], dict[str, Stat]]:
    """The batches that policy `version` may be trained on, and statistics of the samples' age.

    ``staleness`` covers all samples; ``staleness/masked`` or ``staleness/dropped`` is the fraction that was too old.
    Raises ValueError for a stale sample if ``stale_samples`` is stop.
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
    """Number of versions that a sample may be behind; None if the generator does not get its weights from this
    engine.
    """
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
            f"sample {batch.rows[row]} was sampled by policy version {sampled_by}, {version - sampled_by} behind the "
            f"weights to be trained, and schedule.max_staleness is {most}; set `schedule.stale_samples` to mask or "
            "drop to continue without such samples"
        )
