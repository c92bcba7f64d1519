"""Prints the reference of the pipeline file, from the schema: ``python docs/make_pipeline.py > docs/pipeline.md``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAliasType, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dagrl.config.columns import CORE_COLUMNS
from dagrl.config.schema import Pipeline, RolloutNode, TurnOptions
from dagrl.config.schema.backends import engine_sections

_INTRODUCTION = """\
# The pipeline file

Generated from the schema by `python docs/make_pipeline.py`; a test keeps it up to date.

YAML, read with a safe loader. `extends: NAME` starts from a file in `dag_templates/` (or from a path), and the file
holds only the differences: mappings are merged, everything else is replaced, `null` removes a key. A node with another
`fn` inherits no `args`, which are those of the function. With `extends: [dapo, tiny]`, each file is merged into the one
before it, and the file itself into the last. Paths are relative to the file that names them.
`dagrl run FILE engines.actor.optimizer.lr=3e-6` sets any key by its dotted path. Unknown keys are errors.
"""


def reference() -> str:
    """The whole reference, as Markdown."""
    sections: dict[type[BaseModel], str] = {}
    _collect(Pipeline, "", sections)
    parts = [_INTRODUCTION]
    for section, title in sections.items():
        parts.append(
            f"## {title or 'The file'}\n\n{inspect.cleandoc(section.__doc__ or '')}\n\n"
            "| key | value | default | |\n|---|---|---|---|"
        )
        parts[-1] += "".join(f"\n{row}" for row in _rows(section, sections)) + "\n"
    columns = [f"| `{each.name}` | {each.shape.value} | {each.meaning} |" for each in CORE_COLUMNS.values()]
    table = "| column | values | |\n|---|---|---|\n" + "\n".join(columns)
    parts.append(f"## Columns\n\nNodes read and write columns; each column has one writer.\n\n{table}\n")
    return "\n".join(parts)


def _collect(section: type[BaseModel], path: str, sections: dict[type[BaseModel], str]) -> None:
    """Add a section and those below it, each at the first path that leads to it."""
    if section in sections:
        return
    kind = next((key for key in ("op", "backend") if key in section.model_fields), None)
    if kind is not None:
        values = get_args(section.model_fields[kind].annotation) or ("module:function",)
        sections[section] = f"{path}, {kind}: {' | '.join(map(str, values))}"
    else:
        sections[section] = path
    if section is RolloutNode:
        sections[TurnOptions] = f"{path}, op: rollout, several turns"
    for name, field in section.model_fields.items():
        below = f"{path}.{name}" if path else name
        if (section, name) == (Pipeline, "engines"):
            kinds: Iterator[tuple[type[BaseModel], str]] = ((each, ".NAME") for each in engine_sections().values())
        else:
            kinds = _sections_in(field.annotation)
        for each, suffix in kinds:
            _collect(each, below + suffix, sections)


def _sections_in(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """The sections in a type, with what comes after the key's name in their path."""
    if isinstance(annotation, TypeAliasType):
        yield from _sections_in(annotation.__value__)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
    else:
        arguments = get_args(annotation)
        if get_origin(annotation) is Annotated:
            arguments = arguments[:1]
        for argument in arguments:
            for section, suffix in _sections_in(argument):
                yield section, (".NAME" if get_origin(annotation) is dict else "") + suffix


def _rows(section: type[BaseModel], sections: Iterable[type[BaseModel]]) -> Iterator[str]:
    # A key that a section inherits from another one is listed there.
    others = [other for other in sections if other in section.__mro__[1:]]
    for name, field in section.model_fields.items():
        if any(name in other.model_fields for other in others):
            continue
        fields = [each.model_fields[name] for each in section.__mro__ if name in getattr(each, "model_fields", {})]
        meaning = " ".join(next((each.description for each in fields if each.description), "").split())
        yield f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None or isinstance(field.default, BaseModel):
        return "{}"
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return ""
    return f"`{list(field.default) if isinstance(field.default, tuple) else field.default}`"


def _type(annotation: Any) -> str:
    """A type in a user's words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, TypeAliasType):
        return _type(annotation.__value__)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return " \\| ".join(f"`{each}`" for each in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(each) for each in arguments if each is not NoneType))
    if origin in (tuple, list):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"name -> {_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false", "Path": "path"}
    return names.get(getattr(annotation, "__name__", ""), "anything")


if __name__ == "__main__":
    print(reference(), end="")
