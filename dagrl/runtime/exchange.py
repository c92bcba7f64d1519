"""Who computes which rows: from a run's shards and the rows' lengths to each rank's share. Pure but for the refs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagrl.data.redistribute import assign
from dagrl.plan.commands import Run
from dagrl.plan.plan import Executor, PlannedTask, Rows
from dagrl.runtime.ledger import Ledger
from dagrl.runtime.messages import PartWork, TaskWork
from dagrl.spec.ops import Scope
from dagrl.spec.schema import Pipeline, UpdateNode


def share_out(
    run: Run,
    task: PlannedTask,
    executor: Executor,
    ledger: Ledger,
    pipeline: Pipeline,
    *,
    position: int,
    committed: int,
) -> list[TaskWork]:
    """The work of each rank of `executor`, or of the one host worker that takes the run.

    `position` in the data set and the newest `committed` step are passed on.
    """
    on_host = task.engine is None
    replicas = 1 if on_host else executor.replicas
    cuts = _cuts(run, task, ledger, pipeline)
    parts: list[list[PartWork]] = [[] for _ in range(replicas)]
    for index, rows in cuts:
        groups = ledger.groups(rows) if task.generates else None
        for replica, places in enumerate(assign(ledger.tokens(rows), groups, replicas)):
            mine = rows[places]
            parts[replica].append(PartWork(index, mine, ledger.sources(task, mine)))
    places_of_ranks = [(0, True)] if on_host else [(place.dp, place.primary) for place in executor.places]
    return [
        TaskWork(
            step=run.step,
            task=task.name,
            op=task.op,
            node=task.node if task.node in pipeline.nodes else None,
            validation=task.rows is Rows.VALIDATION,
            position=position,
            committed=committed,
            shards=pipeline.schedule.shards_per_step,
            parts=tuple(parts[replica]),
            outputs=task.outputs,
            frozen=task.frozen,
            hands_in=primary,
        )
        for replica, primary in places_of_ranks
    ]


def _cuts(run: Run, task: PlannedTask, ledger: Ledger, pipeline: Pipeline) -> Sequence[tuple[int, np.ndarray]]:
    """The rows that are taken together: a shard, a mini-batch, or all."""
    if not task.inputs:
        return []
    node = pipeline.nodes.get(task.node)
    if isinstance(node, UpdateNode):
        rows = ledger.rows(run.shards)
        prompts = node.mini_batch or pipeline.data.prompts_per_step
        ends = np.searchsorted(ledger.groups(rows), np.arange(prompts, pipeline.data.prompts_per_step, prompts))
        return list(enumerate(np.split(rows, ends)))
    if task.scope is Scope.BATCH:
        return [(0, ledger.rows(run.shards))]
    # Where there are fewer groups than shards, an empty one comes before anybody has written the columns it would have.
    return [(shard, rows) for shard in run.shards if len(rows := ledger.rows((shard,)))]
