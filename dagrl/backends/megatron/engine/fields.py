"""Checks fields of Megatron's config dataclasses in a pipeline, and joins them with dagrl's own.

Megatron's dataclasses check neither names nor types, and the engine sets some fields itself; errors are reported
before anything is built.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.megatron.unsupported import clashes_of
from dagrl.models.number_formats import NUMBER_FORMATS


@dataclass(frozen=True, slots=True)
class Fixed:
    """Values that the engine sets itself, and why."""

    values: Mapping[str, Any]
    reason: str
    """Ends a sentence that begins with the field's name."""


def refuse_clashes(spec: MegatronEngineSpec) -> None:
    """Raise ValueError with one line per field that conflicts with how dagrl trains, and why.

    Uses the same table as ``dagrl validate``, for engines whose configuration was not validated.
    """
    errors = [f"{section}.{field}: {reason}" for section, field, reason in clashes_of(spec)]
    if errors:
        raise ValueError("\n".join(errors))


def join_fields(
    config_class: type, section: str, given: Mapping[str, Any], *, defaults: Mapping[str, Any], fixed: tuple[Fixed, ...]
) -> dict[str, Any]:
    """Keyword arguments of `config_class`: `defaults`, overridden by the user's values, overridden by fixed ones.

    `section` is the user's section of the engine. Raises ValueError with one line per wrong field: an unknown name
    (with the nearest known one), a value of the wrong type, or one that conflicts with a fixed one. Setting a fixed
    field to its value is allowed.
    """
    known = {field.name: field.type for field in dataclasses.fields(config_class) if field.init}
    reasons = {name: (value, group.reason) for group in fixed for name, value in group.values.items()}
    accepted, errors = dict(defaults), []
    for name, value in given.items():
        try:
            accepted[name] = _parse(name, value, known, config_class, reasons)
        except ValueError as error:
            errors.append(f"{section}.{name}: {error}")
    if errors:
        raise ValueError("\n".join(errors))
    return {**accepted, **{name: value for name, (value, _) in reasons.items()}}


def _parse(
    name: str, value: Any, known: Mapping[str, Any], config_class: type, reasons: Mapping[str, tuple[Any, str]]
) -> Any:
    """The value converted to the field's type."""
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"Megatron's {config_class.__name__} has no such field{hint}")
    kind = known[name]
    if name in reasons:
        own, reason = reasons[name]
        if value != own:
            raise ValueError(f"{value!r} conflicts with {_plain(own)}: the field {reason}")
        return own
    if "Callable" in str(kind):
        raise ValueError("the field takes a function, which a pipeline file cannot contain")
    if "torch.dtype" in str(kind) and isinstance(value, str) and value in NUMBER_FORMATS:
        value = getattr(torch, NUMBER_FORMATS[value].torch_name)
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str):
        value = kind.__members__.get(value, value)
    try:
        return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{value!r} does not fit: {error.errors()[0]['msg']}") from error


def _plain(value: Any) -> str:
    return value.__name__ if callable(value) else repr(value)
