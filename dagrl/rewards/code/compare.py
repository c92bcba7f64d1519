"""Whether what a program wrote, or a function returned, is what a test expects."""

from __future__ import annotations

import math
from typing import Any

_TOLERANCE = 1e-6


def same_output(written: str, expected: str) -> bool:
    """Word by word, whatever the white space; numbers with a fraction are equal to 1e-6, relative or absolute."""
    mine, theirs = written.split(), expected.split()
    return len(mine) == len(theirs) and all(map(_same_word, mine, theirs))


def same_value(returned: Any, expected: Any) -> bool:
    """Values of JSON. What is expected may be in a list of its own, as in APPS; fractions are equal to 1e-6."""
    alone = isinstance(expected, list) and len(expected) == 1
    return _same(returned, expected) or (alone and _same(returned, expected[0]))


def _same_word(written: str, expected: str) -> bool:
    if written == expected:
        return True
    if not any(sign in expected for sign in ".eE"):
        return False
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
