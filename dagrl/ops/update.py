"""``update``: trains an engine on the step's samples, one optimizer step per mini-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagrl.algorithms.objective import PolicyObjective
from dagrl.algorithms.own_loss import OwnLoss
from dagrl.algorithms.sft import MixedObjective, ObservedObjective
from dagrl.config.schema import UpdateNode
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.trajectories import is_fresh
from dagrl.plugins.declarations import load_formula


def update(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    node = context.declared(UpdateNode)
    policy = PolicyObjective(
        node.loss,
        context.temperature,
        available=parts[0].batch.columns.keys(),
        correction=node.rollout_correction,
        old_is_rollout=node.takes_rollout_for_old,
        longest_response=context.longest_response,
        own=_own_loss([part.batch for part in parts], node, context),
        sources=tuple(context.pipeline.data.train_prefixes.values()),
    )
    # This also holds for a weight of 0, because expert rows are not samples of the policy.
    objective: PolicyObjective | MixedObjective | ObservedObjective = policy
    if "is_expert" in parts[0].batch:
        objective = MixedObjective(policy, node.loss.sft_coef)
    elif node.loss.observation_coef:
        objective = ObservedObjective(policy, node.loss.observation_coef)
    given = [_with_source(context.with_temperatures(part.batch), context) for part in parts]
    batches, ages, counts = without_stale(given, context.trainer.policy_version, context)
    waits = context.step <= node.critic_warmup
    stats = context.train([] if waits else batches, objective)
    # A step may have no samples of a source.
    stats = {name: stat for name, stat in stats.items() if stat.count or not name.startswith("train/")}
    # During critic warmup there are no metrics, although version and learning rate advance.
    rows = np.concatenate([part.batch.rows for part in parts])
    yield Output((), rows, {}, ages if waits else stats | ages, counts=counts)


def _with_source(batch: Batch, context: Context) -> Batch:
    numbers = {name: number for number, name in enumerate(context.pipeline.data.train_prefixes)}
    if not numbers:
        return batch
    of_rows = [numbers.get(name, -1) for name in batch["data_set"].strings()]
    return batch.with_columns({"source": Column(np.array(of_rows, dtype=np.int64))})


def _own_loss(batches: Sequence[Batch], node: UpdateNode, context: Context) -> OwnLoss | None:
    own = context.resources.once(f"loss {node.loss.policy}", lambda: load_formula(node, context.resources.folder))
    if own is None:
        return None
    function, formula = own
    # An empty batch does not show whether a column has one value per response.
    known = [batch for batch in batches if len(batch)]
    per_response = {name for name in formula.reads for batch in known if name in batch and batch[name].offsets is None}
    return OwnLoss(node.loss.policy, function, node.loss.args, formula.reads, per_response)


def without_stale(
    batches: Sequence[Batch], version: int, context: Context
) -> tuple[Sequence[Batch], dict[str, Stat], dict[str, np.ndarray]]:
    """The batches for training policy `version`, statistics of the samples' age, and counts for the account.

    ``staleness`` covers all samples, by their oldest token; ``staleness/masked`` the samples with a token masked as too
    old. Where the versions of tokens are known, ``staleness/tokens`` covers all trained tokens, and only tokens that
    are too old are masked. The counts are tokens of each row of the batches: ``stale`` and ``kept``. Raises ValueError
    for a stale sample if ``stale_samples`` is stop.
    """
    behind = [version - batch["policy_version"].values for batch in batches]
    fresh = [is_fresh(batch) for batch in batches]
    stats = {"staleness": Stat.of(np.concatenate([ages[rows] for ages, rows in zip(behind, fresh, strict=True)]))}
    if all(_by_token(batch) for batch in batches):
        ages = [version - batch["token_version"].values[_fresh_tokens(batch)] for batch in batches]
        stats["staleness/tokens"] = Stat.of(np.concatenate(ages))
    most = _most_behind(context)
    if most is None:
        return batches, stats, {}
    stale = [(ages > most) & rows for ages, rows in zip(behind, fresh, strict=True)]
    choice = context.pipeline.schedule.stale_samples
    if choice == "stop":
        for batch, rows in zip(batches, stale, strict=True):
            _refuse(batch, rows, version, most)
        return batches, stats, {}
    if choice != "drop":
        stats["staleness/masked"] = Stat.of(np.concatenate(stale))
    if not any(rows.any() for rows in stale):
        return batches, stats, {}
    if choice != "drop":
        masked = [_masked(batch, rows, version - most) for batch, rows in zip(batches, stale, strict=True)]
        return masked, stats, _counts(batches, [_trained(batch) for batch in masked])
    kept = [batch.take(np.flatnonzero(~rows)) for batch, rows in zip(batches, stale, strict=True)]
    remaining = [_trained(batch) * ~rows for batch, rows in zip(batches, stale, strict=True)]
    return kept, stats, _counts(batches, remaining)


def _counts(batches: Sequence[Batch], remaining: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    before, kept = np.concatenate([_trained(batch) for batch in batches]), np.concatenate(remaining)
    return {"stale": before - kept, "kept": kept}


def _trained(batch: Batch) -> np.ndarray:
    """Tokens of each row that are not masked, int64 [rows]."""
    mask = batch["response_mask"]
    return np.bincount(np.repeat(np.arange(len(mask)), mask.lengths)[mask.values > 0], minlength=len(mask))


def _fresh_tokens(batch: Batch) -> np.ndarray:
    """Bool [tokens]: the trained tokens that this step sampled."""
    mask = batch["response_mask"]
    return (mask.values > 0) & np.repeat(is_fresh(batch), mask.lengths)


def _by_token(batch: Batch) -> bool:
    """Whether the versions of tokens are known; False if responses of the data set are among the samples."""
    if "token_version" not in batch:
        return False
    return np.array_equal(batch["token_version"].lengths, batch["response_mask"].lengths)


def _most_behind(context: Context) -> int | None:
    """Number of versions by which a sample may lag behind; None if the generator does not get its weights from this
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
    keeps = np.repeat(~stale, mask.lengths)
    if _by_token(batch):
        keeps |= batch["token_version"].values >= oldest
    return batch.with_columns({"response_mask": Column(mask.values * keeps.astype(mask.values.dtype), mask.offsets)})


def _refuse(batch: Batch, stale: np.ndarray, version: int, most: int) -> None:
    for row in np.flatnonzero(stale)[:1]:
        sampled_by = int(batch["policy_version"].values[row])
        raise ValueError(
            f"sample {batch.rows[row]} was sampled by policy version {sampled_by}, {version - sampled_by} behind the "
            f"weights to be trained, and schedule.max_staleness is {most}; set `schedule.stale_samples` to mask or "
            "drop to continue without such samples"
        )
