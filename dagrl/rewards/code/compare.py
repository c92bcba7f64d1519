"""Reads what a program has written or returned in the sandbox, and compares it with what a test expects."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

_TOLERANCE = 1e-6
_WHOLE = re.compile(r"(-?\d+)\.0*")


def same_output(written: str, expected: str) -> bool:
    """Whether all words are equal, ignoring whitespace. Floats are equal within 1e-6, relative or absolute.

    A whole number may be written with zeros behind a point (``3.0``).
    """
    mine, theirs = written.split(), expected.split()
    return len(mine) == len(theirs) and all(map(_same_word, mine, theirs))


def same_value(returned: Any, expected: Any) -> bool:
    """Whether JSON values are equal, floats within 1e-6. The expected value may be wrapped in a list, as in APPS."""
    alone = isinstance(expected, list) and len(expected) == 1
    return _same(returned, expected) or (alone and _same(returned, expected[0]))


def _same_word(written: str, expected: str) -> bool:
    if written == expected:
        return True
    if not any(sign in expected for sign in ".eE"):
        whole = _WHOLE.fullmatch(written)
        return whole is not None and whole[1] == expected
    try:
        return _close(float(written), float(expected))
    except ValueError:
        return False


def _same(returned: object, expected: object) -> bool:
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(map(_same, returned, expected))
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(_same(returned[key], expected[key]) for key in returned)
    if isinstance(expected, float) and isinstance(returned, int | float) and not isinstance(returned, bool):
        return _close(returned, expected)
    return returned == expected and isinstance(returned, bool) == isinstance(expected, bool)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


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
    "list": lambda items: [decoded(item) for item in items],
    "tuple": lambda items: tuple(decoded(item) for item in items),
    "set": lambda items: {decoded(item) for item in items},
    "frozenset": lambda items: frozenset(decoded(item) for item in items),
}
