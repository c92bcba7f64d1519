"""Decodes values of Python's built-in types that the sandbox returns as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def decoded(data: Any) -> Any:
    """Decode a value that `encoded` of the harness wrote. Forged data can raise ValueError or TypeError."""
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("an object stands for no value")
        return data
    if not data or data[0] not in _MADE_BY:
        raise ValueError("a list stands for no value without the name of a type")
    return _MADE_BY[data[0]](data[1:])


def _bytes(parts: Sequence[Any]) -> bytes:
    (text,) = parts
    return bytes(text, "latin-1")


def _dict(items: Sequence[Any]) -> dict[Any, Any]:
    return {decoded(key): decoded(value) for key, value in items}


_MADE_BY: dict[str, Callable[[Sequence[Any]], Any]] = {
    "complex": lambda parts: complex(*parts),
    "bytes": _bytes,
    "dict": _dict,
    "list": lambda items: [decoded(each) for each in items],
    "tuple": lambda items: tuple(decoded(each) for each in items),
    "set": lambda items: {decoded(each) for each in items},
    "frozenset": lambda items: frozenset(decoded(each) for each in items),
}
