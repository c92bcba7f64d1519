"""``transformer:``, ``optimizer:`` and ``ddp:`` of an engine, held against the installed Megatron-core.

Its config classes are read as text: importing megatron would import torch. Without Megatron-core nothing is checked
here; the engine checks once more, and more closely, when it is built.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dagrl.spec.checks.library_fields import check_fields, fields_of_class
from dagrl.spec.checks.model_sizes import ModelSizes
from dagrl.spec.errors import Place
from dagrl.spec.megatron_clashes import SECTIONS, clashes_of
from dagrl.spec.positions import Findings
from dagrl.spec.schema import MegatronEngineSpec, Pipeline

_MODEL_PARALLEL = ("model_parallel_config.py", "ModelParallelConfig")
_TRANSFORMER = ("transformer/transformer_config.py", "TransformerConfig")
_CLASSES: dict[str, tuple[tuple[str, str], ...]] = {
    "transformer": (_TRANSFORMER, _MODEL_PARALLEL),
    "latent attention": (("transformer/transformer_config.py", "MLATransformerConfig"), _TRANSFORMER, _MODEL_PARALLEL),
    "optimizer": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
    "ddp": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
}
"""Section -> files and classes that its fields come from, the class itself first."""


def check_megatron_fields(pipeline: Pipeline, sizes: ModelSizes, findings: Findings) -> None:
    """Report fields that Megatron does not have, that clash with how dagrl trains, or that have a wrong value."""
    for name, engine in pipeline.engines.items():
        if not isinstance(engine, MegatronEngineSpec):
            continue
        refused = {(section, field): reason for section, field, reason in clashes_of(engine)}
        for (section, field), reason in refused.items():
            findings.error(("engines", name, section, field), reason)
        for section in SECTIONS:
            given = {key: value for key, value in getattr(engine, section).items() if (section, key) not in refused}
            kind = "latent attention" if section == "transformer" and sizes.latent_attention else section
            _check_section(("engines", name, section), kind, given, findings)


def _check_section(place: Place, kind: str, given: Mapping[str, Any], findings: Findings) -> None:
    known = megatron_fields(kind) if given else None
    if known is not None:
        check_fields(place, given, known, f"Megatron's {_CLASSES[kind][0][1]}", "Megatron-core", findings)


@cache
def megatron_fields(section: str) -> dict[str, str] | None:
    """Fields of the section's config class -> their type as Megatron writes it; None without Megatron-core."""
    package = importlib.util.find_spec("megatron")
    for location in (package.submodule_search_locations or ()) if package else ():
        core = Path(location) / "core"
        if all((core / file).is_file() for file, _ in _CLASSES[section]):
            fields: dict[str, str] = {}
            for file, class_name in reversed(_CLASSES[section]):
                fields |= fields_of_class((core / file).read_text(encoding="utf-8"), class_name)
            return fields or None
    return None
