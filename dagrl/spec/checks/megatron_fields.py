"""``transformer:``, ``optimizer:`` and ``ddp:`` of an engine, held against the installed Megatron-core.

Its config classes are read as text: importing megatron would import torch. Without Megatron-core nothing is checked
here; the engine checks once more, and more closely, when it is built.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dagrl.spec.errors import Place, nearest, shown, suggest
from dagrl.spec.positions import Findings
from dagrl.spec.schema import MegatronEngineSpec, ParallelSpec, Pipeline

_CLASSES: dict[str, tuple[tuple[str, str], ...]] = {
    "transformer": (
        ("transformer/transformer_config.py", "TransformerConfig"),
        ("model_parallel_config.py", "ModelParallelConfig"),
    ),
    "optimizer": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
    "ddp": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
}
"""Section -> files and classes that its fields come from, the class itself first."""
_SAID_ELSEWHERE: dict[tuple[str, str], str] = {
    **{("transformer", name): f"parallel.{name}" for name in ParallelSpec.model_fields},
    ("optimizer", "min_lr"): "lr_schedule.min_lr",
}
_PLAIN_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "text"),
}


def check_megatron_fields(pipeline: Pipeline, findings: Findings) -> None:
    """Report fields that Megatron does not have, that belong elsewhere, or whose value has the wrong type."""
    for name, engine in pipeline.engines.items():
        if isinstance(engine, MegatronEngineSpec):
            for section in _CLASSES:
                _check_section(("engines", name), section, getattr(engine, section), findings)


def _check_section(place: Place, section: str, given: Mapping[str, Any], findings: Findings) -> None:
    known = megatron_fields(section) if given else None
    for field, value in given.items():
        inner: Place = (*place, section, field)
        if elsewhere := _SAID_ELSEWHERE.get((section, field)):
            findings.error(inner, f"is not said here; say it as `{elsewhere}` of the engine")
        elif known is None:
            continue
        elif field not in known:
            class_name = _CLASSES[section][0][1]
            findings.error(inner, f"Megatron's {class_name} has no field `{field}`; {_near(field, known)}")
        elif known[field] in _PLAIN_TYPES:
            types, words = _PLAIN_TYPES[known[field]]
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                findings.error(inner, f"expected {words}, got {shown(value)}; write {words}")


def _near(field: str, known: Mapping[str, str]) -> str:
    # All of the hundreds of names would help nobody.
    return suggest(field, known) if nearest(field, known) else "look the name up in Megatron-core, or take it out"


@cache
def megatron_fields(section: str) -> dict[str, str] | None:
    """Fields of the section's config class -> their type as Megatron writes it; None without Megatron-core."""
    package = importlib.util.find_spec("megatron")
    for location in (package.submodule_search_locations or ()) if package else ():
        core = Path(location) / "core"
        if all((core / file).is_file() for file, _ in _CLASSES[section]):
            fields: dict[str, str] = {}
            for file, class_name in reversed(_CLASSES[section]):
                fields |= _fields_of_class(core / file, class_name)
            return fields or None
    return None


def _fields_of_class(path: Path, class_name: str) -> dict[str, str]:
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ClassDef) and statement.name == class_name:
            return {
                line.target.id: _without_optional(ast.unparse(line.annotation))
                for line in statement.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            }
    return {}


def _without_optional(annotation: str) -> str:
    return annotation.removeprefix("Optional[").removesuffix("]") if annotation.startswith("Optional[") else annotation
