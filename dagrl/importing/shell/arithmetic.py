"""Evaluates ``$((...))`` of bash: 64-bit integers, division towards zero."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tree_sitter import Node

    from dagrl.importing.shell.words import Scope, Word


class UnknownNumberError(ValueError):
    """The value depends on a variable that the script does not set, or is no number."""


class Expands(Protocol):
    """The parts of an `Expander` that arithmetic needs."""

    scope: Scope

    def text(self, node: Node) -> str: ...

    def single(self, node: Node | None, *, at: int = 1) -> Word: ...


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


class Arithmetic:
    """Evaluates arithmetic nodes."""

    def __init__(self, expander: Expands) -> None:
        self._expander = expander

    def value(self, node: Node) -> int:
        """The value of an expression. UnknownNumberError if it is not known."""
        kind = node.type
        if kind in ("arithmetic_expansion", "parenthesized_expression"):
            inner = [child for child in node.children if child.is_named]
            if len(inner) != 1:
                raise UnknownNumberError(self._expander.text(node))
            return self.value(inner[0])
        if kind == "binary_expression" and len(node.children) == 3:
            return self._binary(node)
        if kind == "unary_expression" and len(node.children) == 2:
            operand = self.value(node.children[1])
            sign = self._expander.text(node.children[0])
            if sign in ("-", "+", "!"):
                return {"-": -operand, "+": operand, "!": int(not operand)}[sign]
        if kind == "ternary_expression":
            condition, first, second = (child for child in node.children if child.is_named)
            return self.value(first if self.value(condition) else second)
        if kind in ("number", "word"):
            return self._number(self._expander.text(node))
        if kind == "variable_name":
            return self._variable(self._expander.text(node))
        if kind in ("simple_expansion", "expansion", "string", "command_substitution", "concatenation"):
            word = self._expander.single(node)
            if word.missing:
                raise UnknownNumberError(word.missing[0])
            return self._number(word.text)
        raise UnknownNumberError(self._expander.text(node))

    def _binary(self, node: Node) -> int:
        left, sign, right = node.children
        operation = _OPERATIONS.get(self._expander.text(sign))
        if operation is None:
            raise UnknownNumberError(self._expander.text(node))
        return _wrapped(operation(self.value(left), self.value(right)))

    def _variable(self, name: str) -> int:
        word = self._expander.scope.scalar(name)
        if word is None or word.missing:
            raise UnknownNumberError(f"${name}")
        return self._number(word.text)

    def _number(self, text: str) -> int:
        text = text.strip()
        if not text:
            return 0
        if re.fullmatch(r"[-+]?(0[xX][0-9a-fA-F]+)", text):
            return int(text, 16)
        if re.fullmatch(r"[-+]?0[0-7]+", text):
            return int(text, 8)
        if re.fullmatch(r"[-+]?\d+", text):
            return int(text)
        if re.fullmatch(r"[A-Za-z_]\w*", text):
            return self._variable(text)
        raise UnknownNumberError(text)


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
