"""Evaluates ``$((...))`` of bash: 64-bit integers, division towards zero."""

from __future__ import annotations

import re
from collections.abc import Callable

from dagrl.importing.shell.syntax import Node


class UnknownNumberError(ValueError):
    """The value depends on a variable that the script does not set, or is no number."""


def _divide(left: int, right: int) -> int:
    if right == 0:
        raise UnknownNumberError("division by zero")
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divide,
    "%": lambda a, b: a - b * _divide(a, b),
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "&&": lambda a, b: int(bool(a) and bool(b)),
    "||": lambda a, b: int(bool(a) or bool(b)),
    "<<": lambda a, b: a << (b % 64),
    ">>": lambda a, b: a >> (b % 64),
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
}


def evaluate(node: Node, text_of: Callable[[Node], str], variable: Callable[[str], str]) -> int:
    """The value of an expression.

    `text_of` expands a word and `variable` returns the text of a variable; both raise UnknownNumberError.
    """
    kind = node["Type"]
    if kind == "ParenArithm":
        return evaluate(node["X"], text_of, variable)
    if kind == "UnaryArithm" and not node.get("Post") and node["Op"] in ("-", "+", "!"):
        operand = evaluate(node["X"], text_of, variable)
        return {"-": -operand, "+": operand, "!": int(not operand)}[node["Op"]]
    if kind == "BinaryArithm" and node["Op"] == "?":
        chosen = "X" if evaluate(node["X"], text_of, variable) else "Y"
        return evaluate(node["Y"][chosen], text_of, variable)
    if kind == "BinaryArithm" and node["Op"] in _OPERATIONS:
        left, right = (evaluate(node[side], text_of, variable) for side in "XY")
        return (_OPERATIONS[node["Op"]](left, right) + 2**63) % 2**64 - 2**63
    if kind == "Word":
        return _number(text_of(node), variable)
    raise UnknownNumberError(kind)


def _number(text: str, variable: Callable[[str], str]) -> int:
    text = text.strip()
    if not text:
        return 0
    if re.fullmatch(r"[-+]?0[xX][0-9a-fA-F]+", text):
        return int(text, 16)
    if re.fullmatch(r"[-+]?0[0-7]+", text):
        return int(text, 8)
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    if re.fullmatch(r"[A-Za-z_]\w*", text):
        return _number(variable(text), variable)
    raise UnknownNumberError(text)
