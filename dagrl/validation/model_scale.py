"""Models that no machine, or none of the declared groups, can hold: told with their number of parameters."""

from __future__ import annotations

from collections.abc import Sequence

from dagrl.config.capability import Capability
from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline
from dagrl.models.gpus import GPUS, gpu_named
from dagrl.models.shape import model_shape

_MOST_PARAMETERS = 10**13
"""Several times the largest models that have been trained."""
_MOST_ON_CPUS = 10**12
"""4 TB in float32, on each of the hosts that generate."""
_LARGEST_GPU = max(GPUS, key=lambda gpu: gpu.memory_bytes)


def check_scale(pipeline: Pipeline, names: Sequence[str], section: Place, findings: Findings) -> None:
    """Report a model of more parameters than can be, or than the groups of the engines `names` have memory for.

    Only the weights are counted, without gradients, optimizer and activations: `dagrl plan` counts all. `section` is
    where the file says the model's config.
    """
    if not names:
        return
    try:
        parameters = model_shape(pipeline.model_of(names[0])).parameters
    except ValueError:
        return  # An unknown family, or a file that cannot be read.
    remedy = "lower hidden_size, num_hidden_layers or its other sizes" if section[-1] == "init" else "copy it again"
    if parameters > _MOST_PARAMETERS:
        message = f"this model has {parameters:.2g} parameters, more than any machine can train; {remedy}"
        findings.error(section, message)
        return
    for name in names:
        if fault := _too_large_for(pipeline, name, parameters):
            depends: list[Place] = [("groups",), ("engines", name)]
            findings.error(section, f"this model has {parameters:.3g} parameters, and {fault}", depends_on=depends)
            return


def _too_large_for(pipeline: Pipeline, name: str, parameters: int) -> str | None:
    """The memory that an engine's group lacks for the weights; None if they fit."""
    engine = pipeline.engines[name]
    home = pipeline.engines.get(engine.frozen_copy_of or "")
    group_name = engine.group or (home.group if home else None)
    group = pipeline.groups.get(group_name or "")
    if group is None or not group.ranks:
        return None
    if group.is_cpu:
        return "CPU slots cannot hold them; use GPUs, or a smaller model" if parameters > _MOST_ON_CPUS else None
    try:
        gpu = gpu_named(group.gpu) if group.gpu else _LARGEST_GPU
    except ValueError:
        return None
    # Generators may hold weights in 4 bits; trainers hold them in bfloat16.
    trains = Capability.TRAIN in engine.capabilities
    needed = parameters * (2.0 if trains else 0.5)
    gpus = group.ranks if engine.replicas_are_servers or trains else 1
    if needed <= gpus * gpu.memory_bytes:
        return None
    return (
        f"its weights alone take {needed / 2**30:,.0f} GiB, more than the {gpus} x {gpu.memory_gib:,.0f} GiB of group "
        f"`{group_name}` ({gpu.name}); add GPUs, or take a smaller model"
    )
