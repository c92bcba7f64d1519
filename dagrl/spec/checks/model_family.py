"""A model's architecture, held against what the megatron engine builds: it would find out when ranks have started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dagrl.spec.errors import Place, shown, suggest
from dagrl.spec.models.families import FAMILIES, REQUIRED, ROPE_KINDS
from dagrl.spec.reading.positions import Findings
from dagrl.spec.schema import MegatronEngineSpec, Pipeline

_ABOVE_ZERO = ("rms_norm_eps", "rope_theta")
"""Fields that no model computes anything with otherwise."""


def check_family(
    pipeline: Pipeline, names: Sequence[str], section: Place, config: Mapping[str, Any], findings: Findings
) -> None:
    """Report what megatron engines cannot build of the model that the engines `names` have.

    `section` is where the file says the model's config, ``model.init`` or ``model.path``.
    """
    _check_numbers(section, config, findings)
    native = [
        name
        for name in names
        if isinstance(engine := pipeline.engines[name], MegatronEngineSpec) and engine.bridge == "native"
    ]
    family = config.get("model_type")
    if not native or not isinstance(family, str):
        return
    depends: list[Place] = [("engines", name, "bridge") for name in native]
    if family not in FAMILIES:
        message = f"the megatron engine has no model type {family!r}; {suggest(family, FAMILIES)}"
        findings.error(_said_at(section, "model_type"), message, depends_on=depends)
        return
    for field, options in REQUIRED[family].items():
        # What is null, or not there, is the usual in Hugging Face's classes.
        if (value := config.get(field)) is not None and value not in options:
            takes = " or ".join(shown(option) for option in options)
            message = f"the megatron engine has no {family} with {field} {shown(value)}; it takes {takes}"
            findings.error(_said_at(section, field), message, depends_on=depends)
    for field in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(field), Mapping):
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind not in ROPE_KINDS[family]:
                known = " or ".join(ROPE_KINDS[family])
                message = f"the megatron engine has no rope scaling of type {shown(kind)}; it knows {known}"
                findings.error(_said_at(section, field), message, depends_on=depends)


def _check_numbers(section: Place, config: Mapping[str, Any], findings: Findings) -> None:
    for field in _ABOVE_ZERO:
        value = config.get(field)
        if isinstance(value, int | float) and not 0 < value < float("inf"):
            message = f"{field} is {value:g}; choose a number above 0"
            findings.error(_said_at(section, field), message)


def _said_at(section: Place, field: str) -> Place:
    return (*section, field) if section[-1] == "init" else section
