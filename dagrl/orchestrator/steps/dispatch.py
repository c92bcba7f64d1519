"""Dispatch: splits the rows of a run over the data-parallel ranks, balanced by tokens, and makes each rank's work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from dagrl.config.schema import AdvantageNode, Pipeline, Scope, TrainingNode
from dagrl.data.redistribute import assign
from dagrl.ops.work import (
    AdvantageWork,
    Begun,
    BufferWork,
    ExperienceWork,
    PartWork,
    RolloutWork,
    ScoreWork,
    SourceWork,
    TaskWork,
    TrainWork,
)
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.scheduler.commands import Run
from dagrl.scheduler.plan import Executor, PlannedTask, Rows


def dispatch(
    run: Run,
    task: PlannedTask,
    executor: Executor,
    batch: BatchIndex,
    pipeline: Pipeline,
    *,
    committed: int,
    prompts: Sequence[int] = (),
    ahead: Sequence[int] = (),
    kl_weight: float | None = None,
    baselines: Mapping[str, float] = MappingProxyType({}),
    experience: tuple[Path, str] | None = None,
    publish: str | None = None,
) -> list[TaskWork]:
    """The work of each rank of `executor`, or of the one CPU worker that takes the run.

    See `SourceWork` for `prompts` and `ahead`, `AdvantageWork` for `kl_weight` and `baselines`, `ExperienceWork` for
    `experience`, its file and explorer, `TrainWork` for `publish`.
    """
    on_cpu = task.engine is None
    replicas = 1 if on_cpu else executor.replicas
    parts: list[list[PartWork]] = [[] for _ in range(replicas)]
    for index, rows in _split(run, task, batch, pipeline):
        groups = batch.groups(rows) if task.whole_groups else None
        for replica, places in enumerate(assign(batch.tokens(rows), groups, replicas)):
            mine = rows[places]
            parts[replica].append(PartWork(index, mine, batch.sources(task, mine)))
    common = _common(run, task, pipeline, committed)
    work: TaskWork
    if experience is not None:
        path, explorer = experience
        written = batch.groups_in(batch.rows(run.shards)) if task.inputs else []
        prompt_ids = np.array([batch.prompt(group) for group in written], dtype=np.int64)
        work = ExperienceWork(
            **common, path=str(path), explorer=explorer, group_size=batch.group_size, prompt_ids=prompt_ids
        )
    elif not task.inputs:
        work = SourceWork(**common, prompts=tuple(prompts), ahead=tuple(ahead), first_group=batch.first_group)
    elif task.replays:
        work = BufferWork(**common, first_group=batch.next_group)
    elif task.trains:
        pieces = task.pieces or (run.shards,)
        begins, ends = run.shards == pieces[0], run.shards == pieces[-1]
        work = TrainWork(**common, begins=begins, ends=ends, publish=publish if ends else None)
    elif not on_cpu:
        work = ScoreWork(**common, frozen=task.frozen, averaged=task.averaged)
    elif isinstance(pipeline.nodes.get(task.node), AdvantageNode):
        work = AdvantageWork(**common, kl_weight=kl_weight, baselines=dict(baselines))
    else:
        work = TaskWork(**common)
    if on_cpu:
        return [replace(work, parts=tuple(parts[0]))]
    return [
        replace(
            work,
            parts=() if executor.are_servers and not place.primary else tuple(parts[place.dp]),
            is_output_rank=place.primary,
        )
        for place in executor.places
    ]


def dispatch_chunk(
    run: Run,
    task: PlannedTask,
    batch: BatchIndex,
    pipeline: Pipeline,
    groups: Sequence[int],
    *,
    committed: int,
    begun: Mapping[int, Begun],
    **options: Any,
) -> RolloutWork:
    """The work of a server that samples these groups. `options` are other fields of `RolloutWork`."""
    rows = batch.rows_of(groups)
    return RolloutWork(
        **_common(run, task, pipeline, committed),
        parts=(PartWork(0, rows, batch.sources(task, rows)),),
        round=run.round,
        begun={group: begun[group] for group in groups if group in begun},
        **options,
    )


def _common(run: Run, task: PlannedTask, pipeline: Pipeline, committed: int) -> dict[str, Any]:
    """The fields of `TaskWork` that are the same on all ranks."""
    return {
        "step": run.step,
        "task": task.name,
        "op": task.op,
        "node": task.node if task.node in pipeline.nodes else None,
        "validation": task.rows is Rows.VALIDATION,
        "committed": committed,
        "shards": pipeline.schedule.shards_per_step,
        "outputs": task.outputs,
        "sampled_by": task.sampled_by,
        "metric_prefix": task.metric_prefix,
    }


def _split(run: Run, task: PlannedTask, batch: BatchIndex, pipeline: Pipeline) -> Sequence[tuple[int, np.ndarray]]:
    """The rows that are processed together: a shard, a mini-batch, or all."""
    if not task.inputs:
        return []
    node = pipeline.nodes.get(task.node)
    if isinstance(node, TrainingNode) and task.trains:
        rows = batch.rows(run.shards)
        prompts = node.mini_batch or pipeline.data.prompts_per_step
        is_returned = np.isin(batch.groups(rows), list(batch.returned))
        own, returned = rows[~is_returned], batch.groups_in(rows[is_returned])
        # Over-sampling leaves gaps in the numbers of groups.
        _, starts = np.unique(batch.groups(own), return_index=True)
        parts = np.split(own, starts[prompts::prompts])
        # Optimizer steps are as many as without returned groups, which are spread over them.
        shares = [batch.rows_of(share.tolist()) for share in np.array_split(returned, len(parts))]
        return [(index, np.concatenate(rows)) for index, rows in enumerate(zip(parts, shares, strict=True))]
    if task.scope is Scope.BATCH:
        return [(0, batch.rows(run.shards))]
    # With fewer groups than shards, an empty shard may come before any task has written its columns.
    return [(shard, rows) for shard in run.shards if len(rows := batch.rows((shard,)))]
