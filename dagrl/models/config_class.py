"""The config class of a model type in the installed transformers: its fields, and what they are by default.

It is read as text, for importing transformers takes seconds; without transformers nothing is known.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

from dagrl.models.library_classes import defaults_of_class, fields_of_class, source_of

UNDECLARED = ("rope_theta", "rope_scaling", "head_dim")
"""What counts though a class may not declare it: config classes fold the names of older files into ``rope_parameters``,
and models read the last, as Qwen3-MoE's does."""
_BASE = ("configuration_utils.py", "PreTrainedConfig")


@cache
def model_fields(family: str) -> tuple[str, dict[str, str]] | None:
    """The config class of one of `FAMILIES`, and its fields -> their type as transformers writes it."""
    source = _source(family)
    base = source_of("transformers", _BASE[0])
    class_name = _class_of(source, family) if source else None
    if source is None or base is None or class_name is None:
        return None
    fields = fields_of_class(base, _BASE[1]) | fields_of_class(source, class_name)
    own = {name: kind for name, kind in fields.items() if not kind.startswith("ClassVar")}
    return class_name, dict.fromkeys(UNDECLARED, "Any") | own


@cache
def model_defaults(family: str) -> dict[str, Any]:
    """What the fields of that class are where a config leaves them out, as far as they are plain values."""
    source = _source(family)
    class_name = _class_of(source, family) if source else None
    return defaults_of_class(source, class_name) if source and class_name else {}


def _source(family: str) -> str | None:
    return source_of("transformers", f"models/{family}/configuration_{family}.py")


def _class_of(source: str, model_type: str) -> str | None:
    """The class that says ``model_type = "..."``."""
    for statement in ast.parse(source).body:
        lines = statement.body if isinstance(statement, ast.ClassDef) else []
        if any(ast.unparse(line) == f"model_type = {model_type!r}" for line in lines):
            assert isinstance(statement, ast.ClassDef)
            return statement.name
    return None
