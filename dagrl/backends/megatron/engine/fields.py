"""Fields of Megatron's config dataclasses, given by name in the pipeline file, checked and joined with dagrl's own.

Megatron's dataclasses check neither names nor types, and the engine fixes some fields itself: this is where a user
hears of it, before anything is built.
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
    """Values that the engine sets itself, and why a user cannot."""

    values: Mapping[str, Any]
    reason: str
    """Ends the sentence that begins with the field's name."""


def refuse_clashes(spec: MegatronEngineSpec) -> None:
    """ValueError, one line for each field of an engine's sections that clashes with how dagrl trains, and why.

    The same table that ``dagrl validate`` goes by, for engines whose description has not come that way.
    """
    errors = [f"{section}.{field}: {reason}" for section, field, reason in clashes_of(spec)]
    if errors:
        raise ValueError("\n".join(errors))


def join_fields(
    config_class: type, section: str, given: Mapping[str, Any], *, defaults: Mapping[str, Any], fixed: tuple[Fixed, ...]
) -> dict[str, Any]:
    """Keyword arguments of `config_class`: `defaults`, over them what the user gave, over all what is fixed.

    `section` is the place in an engine's description that the user wrote in. Raises ValueError, one line for each
    wrong field: an unknown name (with the nearest known one), a value of the wrong type, or one that clashes with a
    fixed one. Giving a fixed field the value that it has anyway is no clash.
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
    """The value in the type that the field has."""
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"Megatron's {config_class.__name__} has no such field{hint}")
    kind = known[name]
    if name in reasons:
        own, reason = reasons[name]
        if value != own:
            raise ValueError(f"{value!r} clashes with {_plain(own)}: the field {reason}")
        return own
    if "Callable" in str(kind):
        raise ValueError("the field takes a function, which a pipeline file cannot hold")
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
