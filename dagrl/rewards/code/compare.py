"""Compares the output of a program, or the return value of a function, with what a test expects."""

from __future__ import annotations

import math
import re
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


def _same(returned: Any, expected: Any) -> bool:
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(map(_same, returned, expected))
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(_same(returned[key], expected[key]) for key in returned)
    if isinstance(expected, float) and isinstance(returned, int | float) and not isinstance(returned, bool):
        return _close(returned, expected)
    return returned == expected and isinstance(returned, bool) == isinstance(expected, bool)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
