"""Assumptions of the planner about machines and GPUs that the file does not describe."""

from __future__ import annotations

from dagrl.config.schema import Pipeline

GPUS_OF_MACHINE = 8


def why_unread(pipeline: Pipeline) -> str | None:
    """Return why ``--gpu`` has no effect on a pipeline; None if it has one."""
    if all(group.is_cpu for group in pipeline.groups.values()):
        return "all groups have CPU slots"
    if all(group.is_cpu or group.gpu for group in pipeline.groups.values()):
        return "all groups of GPUs name theirs in the file (`gpu:`)"
    return None
