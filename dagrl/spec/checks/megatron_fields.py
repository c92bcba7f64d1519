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

from dagrl.spec.checks.model_sizes import ModelSizes
from dagrl.spec.errors import Place, nearest, shown, suggest
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
_PLAIN_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "text"),
}
_LISTS_OF_TEXT = ("List[str]", "list[str]")


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
    if known is None:
        return
    for field, value in given.items():
        inner: Place = (*place, field)
        if field not in known:
            class_name = _CLASSES[kind][0][1]
            findings.error(inner, f"Megatron's {class_name} has no field `{field}`; {_near(field, known)}")
        elif "Callable" in known[field]:
            findings.error(inner, "takes a function, which a pipeline file cannot hold; take it out")
        elif known[field] in _PLAIN_TYPES:
            types, words = _PLAIN_TYPES[known[field]]
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                findings.error(inner, f"expected {words}, got {shown(value)}; write {words}")
        elif known[field] in _LISTS_OF_TEXT:
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                findings.error(inner, f"expected a list of names, got {shown(value)}; write `[one, two]`")
        elif (options := _options(known[field])) and value not in options:
            findings.error(inner, f"{shown(value)} is not known here; {suggest(str(value), map(str, options))}")


def _options(annotation: str) -> tuple[Any, ...]:
    """What a ``Literal`` type allows; nothing for another type."""
    if not annotation.startswith("Literal[") or annotation.count("[") > 1:
        return ()
    return ast.literal_eval(f"({annotation.removeprefix('Literal[').removesuffix(']')},)")


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
