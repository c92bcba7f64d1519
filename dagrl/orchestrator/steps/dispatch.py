"""Dispatch: splits the rows of a run over the data-parallel ranks, balanced by tokens, and makes each rank's work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict

import numpy as np

from dagrl.config.schema import AdvantageNode, Pipeline, Scope, TrainingNode
from dagrl.data.redistribute import assign
from dagrl.ops.work import (
    AdvantageWork,
    Begun,
    BufferWork,
    ExperienceWork,
    PartWork,
    PendingWeights,
    RolloutWork,
    ScoreWork,
    SourceWork,
    TaskWork,
    TrainWork,
)
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.scheduler.commands import Run
from dagrl.scheduler.plan import Executor, PlannedTask, Rows


@dataclass(frozen=True, slots=True)
class OpInputs:
    """Inputs of some ops besides columns."""

    prompts: Sequence[int] = ()
    """See `SourceWork`."""
    ahead: Sequence[int] = ()
    """See `SourceWork`."""
    kl_weight: float | None = None
    """See `AdvantageWork`."""
    baselines: Mapping[str, float] = MappingProxyType({})
    """See `AdvantageWork`."""
    experience: tuple[Path, str] | None = None
    """See `ExperienceWork`: the file, and its explorer."""
    publish: str | None = None
    """See `TrainWork`."""


NO_INPUTS = OpInputs()


def dispatch(
    run: Run,
    task: PlannedTask,
    executor: Executor,
    batch: BatchIndex,
    pipeline: Pipeline,
    *,
    committed: int,
    inputs: OpInputs = NO_INPUTS,
) -> list[TaskWork]:
    """The work of each rank of `executor`, or of the one CPU worker that takes the run."""
    on_cpu = task.engine is None
    replicas = 1 if on_cpu else executor.replicas
    parts: list[list[PartWork]] = [[] for _ in range(replicas)]
    for index, rows in _split(run, task, batch, pipeline):
        groups = batch.groups(rows) if task.whole_groups else None
        for replica, places in enumerate(assign(batch.tokens(rows), groups, replicas)):
            mine = rows[places]
            parts[replica].append(PartWork(index, mine, batch.sources(task, mine)))
    work = _without_parts(run, task, batch, pipeline, _common(run, task, pipeline, committed), inputs)
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


def _without_parts(
    run: Run, task: PlannedTask, batch: BatchIndex, pipeline: Pipeline, common: _Common, inputs: OpInputs
) -> TaskWork:
    """The work of a run, of the class for the op of `task`."""
    if inputs.experience is not None:
        path, explorer = inputs.experience
        written = batch.groups_in(batch.rows(run.shards)) if task.inputs else []
        prompt_ids = np.array([batch.prompt(group) for group in written], dtype=np.int64)
        return ExperienceWork(
            **common, path=str(path), explorer=explorer, group_size=batch.group_size, prompt_ids=prompt_ids
        )
    if not task.inputs:
        prompts, ahead = tuple(inputs.prompts), tuple(inputs.ahead)
        return SourceWork(**common, prompts=prompts, ahead=ahead, first_group=batch.first_group)
    if task.replays:
        return BufferWork(**common, first_group=batch.next_group)
    if task.trains:
        pieces = task.pieces or (run.shards,)
        begins, ends = run.shards == pieces[0], run.shards == pieces[-1]
        return TrainWork(**common, begins=begins, ends=ends, publish=inputs.publish if ends else None)
    if task.engine is not None:
        return ScoreWork(**common, frozen=task.frozen, averaged=task.averaged)
    if isinstance(pipeline.nodes.get(task.node), AdvantageNode):
        return AdvantageWork(**common, kl_weight=inputs.kl_weight, baselines=dict(inputs.baselines))
    return TaskWork(**common)


def dispatch_chunk(
    run: Run,
    task: PlannedTask,
    batch: BatchIndex,
    pipeline: Pipeline,
    groups: Sequence[int],
    *,
    committed: int,
    begun: Mapping[int, Begun],
    attempt: int = 0,
    weights: PendingWeights | None = None,
    gather_s: float = 0.0,
) -> RolloutWork:
    """The work of a server that samples these groups. See `RolloutWork`."""
    rows = batch.rows_of(groups)
    return RolloutWork(
        **_common(run, task, pipeline, committed),
        parts=(PartWork(0, rows, batch.sources(task, rows)),),
        round=run.round,
        begun={group: begun[group] for group in groups if group in begun},
        attempt=attempt,
        weights=weights,
        gather_s=gather_s,
    )


class _Common(TypedDict):
    """The fields of `TaskWork` that are the same on all ranks."""

    step: int
    task: str
    op: str
    node: str | None
    validation: bool
    committed: int
    shards: int
    outputs: dict[str, str]
    sampled_by: str | None
    metric_prefix: str


def _common(run: Run, task: PlannedTask, pipeline: Pipeline, committed: int) -> _Common:
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
    """Groups rows that are processed together: a shard, a mini-batch, or all rows."""
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
        # The number of optimizer steps does not depend on returned groups, which are spread over them.
        shares = [batch.rows_of(share.tolist()) for share in np.array_split(returned, len(parts))]
        return [(index, np.concatenate(rows)) for index, rows in enumerate(zip(parts, shares, strict=True))]
    if task.scope is Scope.BATCH:
        return [(0, batch.rows(run.shards))]
    # With fewer groups than shards, an empty shard may come before any task has written its columns.
    return [(shard, rows) for shard in run.shards if len(rows := batch.rows((shard,)))]
