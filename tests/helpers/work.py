"""Work of any kind, and contexts of ops, with as few arguments as a test needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dagrl.config.schema import (
    AdvantageNode,
    BufferNode,
    LogprobNode,
    Pipeline,
    RewardModelNode,
    RolloutNode,
    TrainingNode,
    ValuesNode,
)
from dagrl.config.schema.rounds import prompts_begun
from dagrl.ops.base import Context, Resources
from dagrl.ops.work import AdvantageWork, BufferWork, RolloutWork, ScoreWork, SourceWork, TaskWork, TrainWork

_KINDS: dict[type, type[TaskWork]] = {
    RolloutNode: RolloutWork,
    AdvantageNode: AdvantageWork,
    BufferNode: BufferWork,
    TrainingNode: TrainWork,
    LogprobNode: ScoreWork,
    ValuesNode: ScoreWork,
    RewardModelNode: ScoreWork,
}


def work_of[Work: TaskWork](kind: type[Work], task: str, **fields: Any) -> Work:
    """Work of step 2, for the node with the task's name."""
    common = {"step": 2, "op": "any", "node": task, "validation": False, "committed": 0, "shards": 2, "outputs": {}}
    return kind(task=task, **{**common, "sampled_by": None, "metric_prefix": "", **fields})


def context_of(pipeline: Pipeline, folder: Path, node: str | None, engine: Any = None, **fields: Any) -> Context:
    """The context of a node in step 1, or of the source; `fields` are those of its work."""
    kind: type[TaskWork] = SourceWork if node is None else TaskWork
    for nodes, work in _KINDS.items():
        if node is not None and isinstance(pipeline.nodes[node], nodes):
            kind = work
    if kind is SourceWork:
        fields = {"prompts": tuple(range(prompts_begun(pipeline))), **fields}
    if kind is BufferWork:
        fields = {"first_group": 7, **fields}
    work = work_of(kind, node or "prompts", **{"step": 1, "node": node, **fields})
    return Context(work, Resources(pipeline, folder, folder / "run"), engine)


def changed(context: Context, **fields: Any) -> Context:
    """The context with other fields of its work."""
    return replace(context, work=replace(context.work, **fields))
