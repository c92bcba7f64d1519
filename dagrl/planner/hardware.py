"""Which GPUs a group has: those that the file says, else those that the caller does; `spec.models.gpus` has a table."""

from __future__ import annotations

from dagrl.config.schema import Pipeline
from dagrl.models.gpus import DEFAULT_GPU, Gpu, gpu_named

__all__ = ["DEFAULT_GPU", "GPUS_OF_MACHINE", "Gpu", "gpu_named", "gpu_of_group", "why_unread"]

GPUS_OF_MACHINE = 8
"""Of a machine of which nobody says more."""


def gpu_of_group(pipeline: Pipeline, group: str, otherwise: str = DEFAULT_GPU) -> Gpu | None:
    """The GPUs of a group; `otherwise` where the file does not say. None for a group of CPU slots."""
    spec = pipeline.groups[group]
    return None if spec.is_cpu else gpu_named(spec.gpu or otherwise)


def why_unread(pipeline: Pipeline) -> str | None:
    """Why the name of a GPU from the command line is read for no group; None where it is."""
    if all(group.is_cpu for group in pipeline.groups.values()):
        return "all groups have CPU slots"
    if all(group.is_cpu or group.gpu for group in pipeline.groups.values()):
        return "all groups of GPUs name theirs in the file (`gpu:`)"
    return None
