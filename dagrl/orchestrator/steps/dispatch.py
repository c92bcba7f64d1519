"""Who computes which rows: from a run's shards and the rows' lengths to each rank's share. Pure but for the refs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dagrl.config.schema import Pipeline, TrainingNode
from dagrl.data.redistribute import assign
from dagrl.graph.op_contracts import Scope
from dagrl.orchestrator.steps.batch_index import Ledger
from dagrl.scheduler.commands import Run
from dagrl.scheduler.plan import Executor, PlannedTask, Rows
from dagrl.workers.messages import Begun, PartWork, TaskWork


def share_out(
    run: Run,
    task: PlannedTask,
    executor: Executor,
    ledger: Ledger,
    pipeline: Pipeline,
    *,
    position: int,
    committed: int,
    carried: Sequence[int] = (),
    prompts: int | None = None,
    kl_weight: float | None = None,
) -> list[TaskWork]:
    """The work of each rank of `executor`, or of the one host worker that takes the run.

    `position` in the data set, the prompts `carried` from earlier steps, how many `prompts` the source takes, the
    newest `committed` step and the weight of a divergence are passed on.
    """
    on_host = task.engine is None
    replicas = 1 if on_host else executor.replicas
    parts: list[list[PartWork]] = [[] for _ in range(replicas)]
    for index, rows in _cuts(run, task, ledger, pipeline):
        groups = ledger.groups(rows) if task.whole_groups else None
        for replica, places in enumerate(assign(ledger.tokens(rows), groups, replicas)):
            mine = rows[places]
            parts[replica].append(PartWork(index, mine, ledger.sources(task, mine)))
    places_of_ranks = [(0, True)] if on_host else [(place.dp, place.primary) for place in executor.places]
    alike = replace(
        _work(run, task, pipeline, committed),
        position=position,
        carried=tuple(carried),
        first_group=ledger.first_group,
        prompts=prompts,
        kl_weight=kl_weight,
    )
    idle_behind = not on_host and executor.leaders_speak
    return [
        replace(alike, parts=() if idle_behind and not primary else tuple(parts[replica]), hands_in=primary)
        for replica, primary in places_of_ranks
    ]


def portion(
    run: Run,
    task: PlannedTask,
    ledger: Ledger,
    pipeline: Pipeline,
    groups: Sequence[int],
    *,
    committed: int,
    begun: Mapping[int, Begun],
) -> TaskWork:
    """The work of a server that gets these groups of a rollout; of some of them there is something from earlier."""
    rows = ledger.rows_of(groups)
    return replace(
        _work(run, task, pipeline, committed),
        parts=(PartWork(0, rows, ledger.sources(task, rows)),),
        streams=True,
        begun={group: begun[group] for group in groups if group in begun},
    )


def _work(run: Run, task: PlannedTask, pipeline: Pipeline, committed: int) -> TaskWork:
    """What all shares of a run have in common."""
    return TaskWork(
        step=run.step,
        task=task.name,
        op=task.op,
        node=task.node if task.node in pipeline.nodes else None,
        validation=task.rows is Rows.VALIDATION,
        position=0,
        committed=committed,
        shards=pipeline.schedule.shards_per_step,
        parts=(),
        outputs=task.outputs,
        frozen=task.frozen,
        hands_in=True,
        round=run.round,
        begins=not task.pieces or run.shards == task.pieces[0],
        ends=not task.pieces or run.shards == task.pieces[-1],
        sampled_by=task.sampled_by,
        told_as=task.told_as,
    )


def _cuts(run: Run, task: PlannedTask, ledger: Ledger, pipeline: Pipeline) -> Sequence[tuple[int, np.ndarray]]:
    """The rows that are taken together: a shard, a mini-batch, or all."""
    if not task.inputs:
        return []
    node = pipeline.nodes.get(task.node)
    if isinstance(node, TrainingNode) and task.trains:
        rows = ledger.rows(run.shards)
        prompts = node.mini_batch or pipeline.data.prompts_per_step
        # Over-sampling leaves groups out, so that their numbers have gaps.
        _, starts = np.unique(ledger.groups(rows), return_index=True)
        return list(enumerate(np.split(rows, starts[prompts::prompts])))
    if task.scope is Scope.BATCH:
        return [(0, ledger.rows(run.shards))]
    # Where there are fewer groups than shards, an empty one comes before anybody has written the columns it would have.
    return [(shard, rows) for shard in run.shards if len(rows := ledger.rows((shard,)))]
