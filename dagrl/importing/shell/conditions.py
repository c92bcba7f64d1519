"""Evaluates ``[ ... ]``, ``[[ ... ]]`` and ``test``; None where only the script's environment knows the answer."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable

from dagrl.importing.shell.syntax import Node, whole_number
from dagrl.importing.shell.words import Expander, Word

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
Result = bool | None


def of_clause(node: Node, expander: Expander) -> Result:
    """The result of ``[[ ... ]]``."""
    kind = node["Type"]
    if kind == "ParenTest":
        return of_clause(node["X"], expander)
    if kind == "Word":
        return _unary("-n", expander.single(node))
    if kind == "UnaryTest":
        if node["Op"] == "!":
            return negated(of_clause(node["X"], expander))
        return _unary(node["Op"], expander.single(node["X"]))
    if node["Op"] in ("&&", "||"):
        return joined(node["Op"], of_clause(node["X"], expander), of_clause(node["Y"], expander))
    return _binary(expander.single(node["X"]), node["Op"], expander.single(node["Y"]), patterns=True)


def of_command(words: list[Word]) -> Result:
    """The result of ``[ ... ]`` or ``test ...``, by its arguments."""
    for operator in ("-o", "-a"):
        places = [index for index, word in enumerate(words) if word.text == operator]
        if places and len(words) > 3:
            left, right = words[: places[0]], words[places[0] + 1 :]
            return joined("||" if operator == "-o" else "&&", of_command(left), of_command(right))
    if words and words[0].text == "!":
        return negated(of_command(words[1:]))
    if len(words) == 3:
        return _binary(words[0], words[1].text, words[2], patterns=False)
    if len(words) == 2:
        return _unary(words[0].text, words[1])
    if len(words) == 1:
        return _unary("-n", words[0])
    return False if not words else None


def negated(result: Result) -> Result:
    """The opposite of a result."""
    return None if result is None else not result


def joined(operator: str, left: Result, right: Result) -> Result:
    """``&&`` or ``||`` of two results."""
    decisive = operator == "||"
    if left is decisive or right is decisive:
        return decisive
    return None if left is None or right is None else not decisive


def _unary(operator: str, operand: Word) -> Result:
    if operator in ("-z", "-n"):
        return None if operand.missing else (operand.text == "") == (operator == "-z")
    return None


def _binary(left: Word, operator: str, right: Word, *, patterns: bool) -> Result:
    if left.missing or right.missing:
        return None
    if operator in ("=", "==", "!="):
        same = fnmatch.fnmatchcase(left.text, right.text) if patterns else left.text == right.text
        return same == (operator != "!=")
    if operator in _NUMBERS:
        first, second = (whole_number(each.text.strip()) for each in (left, right))
        if first is not None and second is not None:
            return _NUMBERS[operator](first, second)
    return None
