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

    ``staleness`` covers all samples, by their oldest token; ``staleness/masked`` or ``staleness/dropped`` are those
    with a token that was too old. Where the versions of tokens are known, ``staleness/tokens`` covers all trained
    tokens, and only those that are too old are masked. Raises ValueError for a stale sample if ``stale_samples`` is
    stop.
    """
    behind = [version - batch["policy_version"].values for batch in batches]
    stats = {"staleness": Stat.of(np.concatenate(behind))}
    if all(_by_token(batch) for batch in batches):
        ages = [version - batch["token_version"].values[batch["response_mask"].values > 0] for batch in batches]
        stats["staleness/tokens"] = Stat.of(np.concatenate(ages))
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
            masked = [
                _masked(batch, rows, version - most) if rows.any() else batch
                for batch, rows in zip(batches, stale, strict=True)
            ]
            return masked, stats | {"staleness/masked": Stat.of(np.concatenate(stale))}


def _by_token(batch: Batch) -> bool:
    """Whether the versions of tokens are known. They are not where responses of the data set are among the samples."""
    if "token_version" not in batch:
        return False
    return np.array_equal(batch["token_version"].lengths, batch["response_mask"].lengths)


def _most_behind(context: Context) -> int | None:
    """Number of versions that a sample may be behind; None if the generator does not get its weights from this
    engine.
    """
    schedule, rollout, update = context.pipeline.schedule, context.rollout, context.declared(UpdateNode)
    if getattr(context.pipeline.engines[rollout.engine], "weights_from", None) != update.engine:
        return None
    if schedule.stale_samples == "auto" and rollout.partial_rollout:
        return schedule.max_staleness + rollout.partial_rollout_max_age
    return schedule.max_staleness


def _masked(batch: Batch, stale: np.ndarray, oldest: int) -> Batch:
    """Mask the tokens of weights before `oldest`, or `stale` rows if the versions of tokens are not known."""
    mask = batch["response_mask"]
    keeps = batch["token_version"].values >= oldest if _by_token(batch) else np.repeat(~stale, mask.lengths)
    return batch.with_columns({"response_mask": Column(mask.values * keeps.astype(mask.values.dtype), mask.offsets)})


def _refuse(batch: Batch, stale: np.ndarray, version: int, most: int) -> None:
    for row in np.flatnonzero(stale)[:1]:
        sampled_by = int(batch["policy_version"].values[row])
        raise ValueError(
            f"sample {batch.rows[row]} was sampled by policy version {sampled_by}, {version - sampled_by} behind the "
            f"weights to be trained, and schedule.max_staleness is {most}; set `schedule.stale_samples` to mask or "
            "drop to continue without such samples"
        )
