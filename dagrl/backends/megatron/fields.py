"""``transformer:``, ``optimizer:`` and ``ddp:`` of an engine, held against the installed Megatron-core.

Its config classes are read as text: importing megatron would import torch. Without Megatron-core nothing is checked
here; the engine checks once more, and more closely, when it is built.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from dagrl.backends.backend import EngineCheck
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.megatron.unsupported import SECTIONS, clashes_of
from dagrl.config.errors import Place, shown, suggest
from dagrl.config.loading.positions import Findings
from dagrl.models.library_classes import check_fields, fields_of_class, source_of

_MODEL_PARALLEL = ("core/model_parallel_config.py", "ModelParallelConfig")
_TRANSFORMER = ("core/transformer/transformer_config.py", "TransformerConfig")
_CLASSES: dict[str, tuple[tuple[str, str], ...]] = {
    "transformer": (_TRANSFORMER, _MODEL_PARALLEL),
    "latent attention": (
        ("core/transformer/transformer_config.py", "MLATransformerConfig"),
        _TRANSFORMER,
        _MODEL_PARALLEL,
    ),
    "optimizer": (("core/optimizer/optimizer_config.py", "OptimizerConfig"),),
    "ddp": (("core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
}
"""Section -> files and classes that its fields come from, the class itself first."""
_ENUMERATIONS = "core/transformer/enums.py"
_MODULE_LISTS = ("recompute_modules", "offload_modules")
"""Fields of ``transformer:`` that name parts of a layer."""


def check_fields_of(check: EngineCheck[MegatronEngineSpec]) -> None:
    """Report fields that Megatron does not have, that dagrl does not support, or that have a wrong value."""
    refused = {(section, field): reason for section, field, reason in clashes_of(check.engine)}
    for (section, field), reason in refused.items():
        check.findings.error((*check.place, section, field), reason)
    for section in SECTIONS:
        given = {key: value for key, value in getattr(check.engine, section).items() if (section, key) not in refused}
        kind = "latent attention" if section == "transformer" and check.sizes.latent_attention else section
        _check_section((*check.place, section), kind, given, check.findings)
    _check_module_names((*check.place, "transformer"), check.engine.transformer, check.findings)


def _check_module_names(place: Place, given: Mapping[str, Any], findings: Findings) -> None:
    for field in _MODULE_LISTS:
        names = given.get(field)
        if not isinstance(names, list) or not (known := module_names(field)):
            continue
        for index, name in enumerate(names):
            if isinstance(name, str) and name not in known:
                message = f"{shown(name)} is no part of a layer that {field} knows; {suggest(name, known)}"
                findings.error((*place, field, index), message)


def _check_section(place: Place, kind: str, given: Mapping[str, Any], findings: Findings) -> None:
    known = megatron_fields(kind) if given else None
    if known is not None:
        check_fields(place, given, known, f"Megatron's {_CLASSES[kind][0][1]}", "Megatron-core", findings)


@cache
def megatron_fields(section: str) -> dict[str, str] | None:
    """Fields of the section's config class -> their type as Megatron writes it; None without Megatron-core."""
    fields: dict[str, str] = {}
    for file, class_name in reversed(_CLASSES[section]):
        source = source_of("megatron", file)
        if source is None:
            return None
        fields |= fields_of_class(source, class_name)
    return {field: _named(kind) for field, kind in fields.items()} or None


@cache
def _named(kind: str) -> str:
    """The type, and of an enumeration of Megatron's the names that it has, by which the engine takes them."""
    source = source_of("megatron", _ENUMERATIONS) if kind.isidentifier() else None
    for statement in ast.parse(source).body if source else ():
        if isinstance(statement, ast.ClassDef) and statement.name == kind:
            names = [line.targets[0] for line in statement.body if isinstance(line, ast.Assign)]
            return f"Literal[{', '.join(repr(ast.unparse(name)) for name in names)}]"
    return kind


@cache
def module_names(field: str) -> tuple[str, ...]:
    """What may stand in a list of parts of a layer, such as ``recompute_modules``; nothing where that cannot be read.

    Megatron knows it where it checks it::

        allowed_modules = {"core_attn", ...}
        invalid_modules = set(self.recompute_modules) - allowed_modules
    """
    source = source_of("megatron", _TRANSFORMER[0])
    if source is None:
        return ()
    blocks = (getattr(node, name, ()) for node in ast.walk(ast.parse(source)) for name in ("body", "orelse"))
    for block in blocks:
        for allowed, check in pairwise(block if isinstance(block, list) else ()):
            if (
                isinstance(allowed, ast.Assign)
                and isinstance(allowed.value, ast.Set)
                and isinstance(check, ast.Assign)
                and ast.unparse(check.value) == f"set(self.{field}) - {ast.unparse(allowed.targets[0])}"
            ):
                return tuple(sorted(ast.literal_eval(allowed.value)))
    return ()
