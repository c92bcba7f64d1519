"""Evaluates ``[ ... ]``, ``[[ ... ]]`` and ``test``; None where only the script's environment knows the answer."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

from dagrl.importing.shell.words import Word

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_FILES = ("-f", "-d", "-e", "-r", "-w", "-x", "-s", "-L", "-h", "-v")


def evaluate(tokens: list[Word | str]) -> bool | None:
    """The result of a test: operators are plain texts, operands are words."""
    try:
        value, rest = _disjunction(tokens)
    except (IndexError, ValueError):
        return None
    return None if rest else value


def _disjunction(tokens: list[Word | str]) -> tuple[bool | None, list[Word | str]]:
    value, rest = _conjunction(tokens)
    while rest and rest[0] in ("||", "-o"):
        right, rest = _conjunction(rest[1:])
        value = True if value or right else (None if value is None or right is None else False)
    return value, rest


def _conjunction(tokens: list[Word | str]) -> tuple[bool | None, list[Word | str]]:
    value, rest = _primary(tokens)
    while rest and rest[0] in ("&&", "-a"):
        right, rest = _primary(rest[1:])
        value = False if value is False or right is False else (None if value is None or right is None else True)
    return value, rest


def _primary(tokens: list[Word | str]) -> tuple[bool | None, list[Word | str]]:
    head = tokens[0]
    if head == "!":
        value, rest = _primary(tokens[1:])
        return (None if value is None else not value), rest
    if head == "(":
        value, rest = _disjunction(tokens[1:])
        if rest[0] != ")":
            raise ValueError("no closing bracket")
        return value, rest[1:]
    if isinstance(head, str) and head in ("-z", "-n"):
        operand = tokens[1]
        assert isinstance(operand, Word)
        return (None if operand.missing else (operand.text == "") == (head == "-z")), tokens[2:]
    if isinstance(head, str) and head in _FILES:
        return None, tokens[2:]
    if not isinstance(head, Word):
        raise ValueError(head)
    if len(tokens) > 2 and isinstance(tokens[1], str) and isinstance(tokens[2], Word):
        return _compare(head, tokens[1], tokens[2]), tokens[3:]
    return (None if head.missing else head.text != ""), tokens[1:]


def _compare(left: Word, operator: str, right: Word) -> bool | None:
    if left.missing or right.missing:
        return None
    if operator in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left.text, right.text) == (operator != "!=")
    if operator in _NUMBERS:
        numbers = [each.text.strip() for each in (left, right)]
        if all(re.fullmatch(r"[-+]?\d+", number) for number in numbers):
            return _NUMBERS[operator](*map(int, numbers))
    return None
