"""Builds Megatron's config dataclasses from names and plain values."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from dagrl.model_files.number_formats import NUMBER_FORMATS


def arguments_of(
    config_class: type, section: str, given: Mapping[str, Any], *, defaults: Mapping[str, Any], fixed: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of `config_class`: `defaults`, then the `given` ones of a `section`, then `fixed` ones.

    Names of number formats and enumerations become torch's and Megatron's objects. Raises ValueError with a line for
    each name that the class does not have.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(config_class) if field.init}
    errors = []
    for name in given.keys() - kinds.keys():
        close = difflib.get_close_matches(name, kinds, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "; remove it"
        errors.append(f"{section}.{name}: Megatron's {config_class.__name__} has no such field{hint}")
    if errors:
        raise ValueError("\n".join(sorted(errors)))
    return {**defaults, **{name: _value(kinds[name], value) for name, value in given.items()}, **fixed}


def build_config[Config](config_class: type[Config], section: str, arguments: Mapping[str, Any]) -> Config:
    """Build the config. Raises ValueError with the section if Megatron rejects the arguments."""
    try:
        return config_class(**arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{section}: Megatron rejects these fields: {error}") from error


def _value(kind: Any, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if "torch.dtype" in str(kind) and value in NUMBER_FORMATS:
        return getattr(torch, NUMBER_FORMATS[value].torch_name)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind.__members__.get(value, value)
    return value
