"""The config of a model, in ``model.init`` and in config.json alike: its fields, unsupported features, and its scale.

The config class of the installed transformers gives the fields. Without transformers, and for model types without a
family, names are not checked; the engine checks again when it builds the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dagrl.backends.families.config_fields import wrong_values
from dagrl.backends.families.registry import UNKNOWN, find_family, model_shape, unknown_family
from dagrl.backends.planning.gpus import GPUS, gpu_named
from dagrl.backends.registry import backend_of
from dagrl.config.capability import Capability
from dagrl.config.errors import Place, nearest, removal, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline
from dagrl.model_files.hf_config import HfConfig
from dagrl.model_files.library_classes import NO_CLASS, config_class

_MOST_PARAMETERS = 10**13
"""Several times the largest models that have been trained."""


def check_config(section: Place, config: HfConfig, file: Path | None, findings: Findings) -> bool:
    """Report fields that the config class lacks, invalid values, and sizes that do not fit.

    `section` is the place of the config in the pipeline, ``model.init`` or ``model.path``; `file` is the folder's
    config.json, which may have extra fields. Returns whether all values are of the right kind.
    """
    family = find_family(config.get("model_type"))
    class_name, types, _ = config_class(family.model_type) if family else NO_CLASS
    if file is None and types:
        for name in config.keys() - types.keys() - {"model_type"}:
            message = f"{class_name} has no field `{name}`"
            if nearest(name, types):
                message = f"{message}; {suggest(name, types)}"
            else:
                message = removal(message, "look the name up in transformers")
            findings.error((*section, name), message, "unknown-field")
    known = family or UNKNOWN
    wrong = [
        (field, message)
        for field, message in wrong_values(config, types, known.ranges)
        if file or not types or field in types
    ]
    for field, message in wrong:
        where = f"{file} has a wrong value of `{field}`: " if file else ""
        text = f"{where}{message}"
        text = f"{text}; copy the file again, or correct it" if file else removal(text, "write it so")
        findings.error(_place_of(section, field), text, "invalid-config")
    if wrong:
        return False
    if file and family and (left_out := family.sizes_left_out(config)):
        message = f"{file} does not say {left_out[0]}, a size of the model; copy the file again, or add it there"
        findings.error(section, message, "invalid-config")
        return False
    for message in known.conflicts(known.fields(config)):
        findings.error(section, f"{file}: {message}" if file else message, "invalid-config")
    return True


def check_family(
    pipeline: Pipeline, names: Sequence[str], section: Place, config: HfConfig, findings: Findings
) -> None:
    """Report features that engines among `names` whose backends build families cannot build.

    The config has passed `check_config`.
    """
    if any(backend_of(pipeline.engines[name]).builds_families for name in names):
        check_architecture(section, config, findings)


def check_architecture(section: Place, config: HfConfig, findings: Findings) -> None:
    """Report features that no family describes, or that the Megatron engine cannot build, as `check_family` does."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return
    family = find_family(model_type)
    if family is None:
        findings.error(_place_of(section, "model_type"), unknown_family(model_type), "unknown-family")
        return
    fields = family.fields(config)
    for field, message in family.unsupported(fields):
        findings.error(_place_of(section, field), message, "unsupported-model")
    for field, message in family.warnings(fields):
        findings.warning(_place_of(section, field), message, "unsupported-model")


def check_scale(pipeline: Pipeline, engines: Sequence[str], section: Place, findings: Findings) -> None:
    """Report a model with an impossible number of parameters, or more than fit into the memory of its `engines`'
    groups.

    Only the weights count, without gradients, optimizer and activations: `dagrl plan` counts all.
    """
    try:
        parameters = model_shape(pipeline.model_of(engines[0])).parameters
    except ValueError:
        return  # An unknown family, or a file that cannot be read.
    if parameters > _MOST_PARAMETERS:
        remedy = "lower hidden_size, num_hidden_layers or its other sizes" if section[-1] == "init" else "copy it again"
        message = f"this model has {parameters:.2g} parameters, more than any machine can train; {remedy}"
        findings.error(section, message, "model-too-large")
        return
    for engine in engines:
        if lack := _lack_of_memory(pipeline, engine, parameters):
            message = f"this model has {parameters:.3g} parameters, and {lack}; add GPUs, or take a smaller model"
            findings.error(section, message, "model-too-large", depends_on=[("groups",), ("engines", engine)])
            return


def _lack_of_memory(pipeline: Pipeline, name: str, parameters: int) -> str | None:
    """Return the memory that the GPUs of an engine's group lack for the weights; None if they fit, or may fit."""
    engine = pipeline.engines[name]
    home = pipeline.engines.get(engine.frozen_copy_of or "", engine)
    group = pipeline.groups.get(home.group or "")
    if group is None or group.is_cpu or not group.ranks:
        return None
    try:
        gpu = gpu_named(group.gpu) if group.gpu else max(GPUS, key=lambda gpu: gpu.memory_bytes)
    except ValueError:
        return None
    # Generators may hold weights in 4 bits; trainers hold them in bfloat16.
    trains = Capability.TRAIN in engine.capabilities
    needed = parameters * (2.0 if trains else 0.5)
    gpus = group.ranks if engine.replicas_are_servers or trains else 1
    if needed <= gpus * gpu.memory_bytes:
        return None
    held = f"{gpus} x {gpu.memory_gib:,.0f} GiB of group `{home.group}` ({gpu.name})"
    return f"its weights alone take {needed / 2**30:,.0f} GiB, more than the {held}"


def _place_of(section: Place, field: str) -> Place:
    """Return the place of a config's field in the file: the field in ``init``, otherwise the whole folder."""
    return (*section, field) if section[-1] == "init" else section
