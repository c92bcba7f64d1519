"""Evaluates ``$((...))`` of bash: 64-bit integers, division towards zero."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from dagrl.importing.shell.syntax import Node, whole_number


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


@dataclass(frozen=True, slots=True)
class Variables:
    """The variables that an expression reads and changes."""

    text_of: Callable[[Node], str]
    """Expands a word. UnknownNumberError if it depends on what is not known."""
    read: Callable[[str], str]
    """The text of a variable. UnknownNumberError if it is not known."""
    assign: Callable[[str, int | None], None]
    """Changes a variable; None if its new value is not known."""


def evaluate(node: Node, variables: Variables) -> int:
    """The value of an expression, whose assignments are made. UnknownNumberError if it is not known."""
    kind = node["Type"]
    if kind == "ParenArithm":
        return evaluate(node["X"], variables)
    if kind == "UnaryArithm" and node["Op"] in ("++", "--"):
        step = 1 if node["Op"] == "++" else -1
        after = _assign(node["X"], lambda: _wrapped(evaluate(node["X"], variables) + step), variables)
        return after - step if node.get("Post") else after
    if kind == "UnaryArithm" and node["Op"] in ("-", "+", "!"):
        operand = evaluate(node["X"], variables)
        return {"-": -operand, "+": operand, "!": int(not operand)}[node["Op"]]
    if kind == "BinaryArithm":
        return _binary(node, node["Op"], variables)
    if kind == "Word":
        return _number(variables.text_of(node), variables.read)
    raise UnknownNumberError(kind)


def _binary(node: Node, operator: str, variables: Variables) -> int:
    left, right = node["X"], node["Y"]
    if operator == "?":
        return evaluate(right["X" if evaluate(left, variables) else "Y"], variables)
    if operator == ",":
        evaluate(left, variables)
        return evaluate(right, variables)
    if operator == "=":
        return _assign(left, lambda: evaluate(right, variables), variables)
    if operator in _OPERATIONS:
        return _wrapped(_OPERATIONS[operator](evaluate(left, variables), evaluate(right, variables)))
    change = _OPERATIONS.get(operator.removesuffix("="))
    if change is None:
        raise UnknownNumberError(operator)
    return _assign(left, lambda: _wrapped(change(evaluate(left, variables), evaluate(right, variables))), variables)


def _assign(target: Node, value_of: Callable[[], int], variables: Variables) -> int:
    """Change the variable that a word names to a value, or to an unknown one."""
    parts = target.get("Parts", ())
    name = parts[0].get("Value", "") if len(parts) == 1 else ""
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise UnknownNumberError("an element of an array")
    try:
        value = value_of()
    except UnknownNumberError:
        variables.assign(name, None)
        raise
    variables.assign(name, value)
    return value


def _wrapped(number: int) -> int:
    """As an integer of 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def _number(text: str, variable: Callable[[str], str]) -> int:
    text = text.strip()
    if not text:
        return 0
    if re.fullmatch(r"[-+]?0[xX][0-9a-fA-F]{1,300}", text):
        return int(text, 16)
    if re.fullmatch(r"[-+]?0[0-7]{1,300}", text):
        return int(text, 8)
    if (number := whole_number(text)) is not None:
        return number
    if re.fullmatch(r"[A-Za-z_]\w*", text):
        return _number(variable(text), variable)
    raise UnknownNumberError(text)
