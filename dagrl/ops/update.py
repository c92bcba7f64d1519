"""``update``: trains an engine on the step's samples, one optimizer step per mini-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagrl.algorithms.objective import PolicyObjective
from dagrl.algorithms.own_loss import OwnLoss
from dagrl.algorithms.sft import MixedObjective, ObservedObjective
from dagrl.config.schema import UpdateNode
from dagrl.data.batch import Batch, Column
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.stale import without_stale
from dagrl.plugins.declarations import load_formula


def update(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Train on the mini-batches in order, and yield their common metrics."""
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
    # Also with a weight of 0: an expert's rows are no samples of the policy.
    objective: PolicyObjective | MixedObjective | ObservedObjective = policy
    if "is_expert" in parts[0].batch:
        objective = MixedObjective(policy, node.loss.sft_coef)
    elif node.loss.observation_coef:
        objective = ObservedObjective(policy, node.loss.observation_coef)
    given = [_with_source(context.with_temperatures(part.batch), context) for part in parts]
    batches, ages, counts = without_stale(given, context.trainer.policy_version, context)
    waits = context.step <= node.critic_warmup
    stats = context.train([] if waits else batches, objective)
    # A step need not have samples of each source.
    stats = {name: stat for name, stat in stats.items() if stat.count or not name.startswith("train/")}
    # During critic warmup there are no metrics, although version and learning rate advance.
    rows = np.concatenate([part.batch.rows for part in parts])
    yield Output((), rows, {}, ages if waits else stats | ages, counts=counts)


def _with_source(batch: Batch, context: Context) -> Batch:
    """The batch with the number of each row's source, if there are several."""
    numbers = {name: number for number, name in enumerate(context.pipeline.data.train_prefixes)}
    if not numbers:
        return batch
    of_rows = [numbers.get(name, -1) for name in batch["data_set"].strings()]
    return batch.with_columns({"source": Column(np.array(of_rows, dtype=np.int64))})


def _own_loss(batches: Sequence[Batch], node: UpdateNode, context: Context) -> OwnLoss | None:
    """The user's loss, if the node names one."""
    own = context.resources.once(f"loss {node.loss.policy}", lambda: load_formula(node, context.resources.folder))
    if own is None:
        return None
    function, formula = own
    # An empty batch does not show whether a column has one value per response.
    known = [batch for batch in batches if len(batch)]
    per_response = {name for name in formula.reads for batch in known if name in batch and batch[name].offsets is None}
    return OwnLoss(node.loss.policy, function, node.loss.args, formula.reads, per_response)
