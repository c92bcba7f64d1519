"""``model.init``, held against the config class of its model type in the installed transformers.

The class is read as text: importing transformers takes seconds. Without it, and for model types that dagrl does not
know by itself, nothing is checked here; the engine checks once more when it is built.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

from dagrl.spec.checks.library_fields import check_fields, defaults_of_class, fields_of_class, source_of
from dagrl.spec.checks.model_sizes import SIZE_KEYS, is_size
from dagrl.spec.errors import Place
from dagrl.spec.model_families import FAMILIES
from dagrl.spec.positions import Findings
from dagrl.spec.schema import ModelSpec, Pipeline

UNDECLARED = ("rope_theta", "rope_scaling", "head_dim")
"""What counts though a class may not declare it: config classes fold the names of older files into ``rope_parameters``,
and models read the last, as Qwen3-MoE's does."""
_BASE = ("configuration_utils.py", "PreTrainedConfig")


def check_model_fields(pipeline: Pipeline, findings: Findings) -> None:
    """Report fields that the config class does not have, and plain values of another type."""
    _check_init(("model", "init"), pipeline.model, findings)
    for name, engine in pipeline.engines.items():
        if engine.model is not None:
            _check_init(("engines", name, "model", "init"), engine.model, findings)


def _check_init(place: Place, model: ModelSpec, findings: Findings) -> None:
    init = model.init
    family = init.get("model_type") if init else None
    if init is None or family not in FAMILIES or (known := model_fields(family)) is None:
        return
    class_name, fields = known
    # `model.py` says what is wrong with a size.
    wrong_sizes = {name for name in SIZE_KEYS if not is_size(init.get(name))}
    given = {name: value for name, value in init.items() if name not in wrong_sizes | {"model_type"}}
    check_fields(place, given, fields, class_name, "transformers", findings)


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
