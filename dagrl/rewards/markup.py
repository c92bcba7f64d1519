r"""Removes markup around an answer that does not change it: boxes, dollars, fonts, punctuation, units."""

from __future__ import annotations

import re

# An escaped brace is a character, not a delimiter.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_GROUP = re.compile(
    r"(?:\\(?P<command>boxed|fbox|text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|mathsf|boldsymbol|bm)\s*)?\{"
)
_TEXT = {"text", "textbf", "textit", "textrm", "mbox", "mathrm"}
_WORDS = re.compile(r"(?!\s*-?\d).*[A-Za-z]{2}", re.DOTALL)
_DELIMITED = re.compile(
    r"(?:\$\$?(?P<dollars>(?:[^$\\]|\\.)+)\$\$?|\\\((?P<inline>.+)\\\)|\\\[(?P<display>.+)\\\])", re.DOTALL
)
_DELIMITER = re.compile(r"(?<!\\)\$|(?<!\\)\\[()\[\]]")
_LEAD = re.compile(r"[A-Za-z][^$\\\d=]*?(?:\b(?:is|are|was|were|equals?)\b:?|\banswer:)\s*(?=\S)", re.IGNORECASE)
_SPACE = r"(?:\s|~|\\[,;:! ]|\\q?quad(?![a-z])|\\\\)"
_START = re.compile(rf"(?:{_SPACE}|\*\*|\\displaystyle(?![a-z])|\\bf(?![a-z]))+")
_END = re.compile(rf"(?:{_SPACE}|\*\*|(?<!\\right)[.,;:])+\Z")

_UNIT_TEXT = r"\\(?:text|textrm|mathrm|mbox|rm)\s*\{(?!\s*(?:and|or|[ide])\b)[^{}]*\}"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_UNIT_IN_TEXT = re.compile(rf"{_SPACE}*{_UNIT_TEXT}{_POWER}(?:{_SPACE}*(?:/|\\cdot)?{_SPACE}*{_UNIT_TEXT}{_POWER})*\Z")
_UNIT_IN_WORDS = re.compile(rf"(?<=[\d}})])\s+(?P<words>(?:[A-Za-z]{{2,}}|[mgshLlJNWVK])(?:[ /][A-Za-z]+)*){_POWER}\Z")
_UNIT_IN_CJK = re.compile(
    rf"(?<=[\d}})]){_SPACE}*(?![\u4e00-\u9fff]*[一二三四五六七八九十百千万亿兆萬億和或与及])[\u3400-\u9fff]{{1,6}}\Z"
)
"""Not what makes another number of it, as in ``5万``."""
_IN_FORMULAS = {
    "and", "or", "to", "pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "mod", "inf", "infinity", "percent",
    "times", "plus", "minus", "over", "choose", "not",
}  # fmt: skip


def closing_braces(text: str) -> dict[int, int]:
    """Positions of all braces that are closed, each with that of its closing brace."""
    closed: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closed[opened.pop()] = brace.start()
    return closed


def unwrapped(answer: str) -> str:
    r"""The answer alone: ``**$\boxed{5}$.**`` and ``The answer is $5$`` become ``5``. Words stay in ``\text{}``."""
    while True:
        answer = _trimmed(answer)
        lead = _LEAD.match(answer)
        answer = answer[lead.end() :] if lead else answer
        inside = _inside(answer)
        if inside is None:
            return _DELIMITER.sub("", answer)
        answer = inside


def _trimmed(answer: str) -> str:
    start = _START.match(answer)
    answer = answer[start.end() :] if start else answer
    end = _END.search(answer)
    return answer[: end.start()] if end else answer


def _inside(answer: str) -> str | None:
    """The content of a pair of delimiters around the whole answer; None without one."""
    delimited = _DELIMITED.fullmatch(answer)
    if delimited and not _DELIMITER.search(inside := delimited[delimited.lastgroup or 0]):
        return inside
    group = _GROUP.match(answer)
    if not group or closing_braces(answer).get(group.end() - 1) != len(answer) - 1:
        return None
    inside = answer[group.end() : -1]
    return None if group["command"] in _TEXT and _WORDS.match(inside) else inside


def without_unit(answer: str) -> str:
    r"""The answer without a unit: ``5~\mathrm{cm}^2``, ``5\text{ apples}`` and ``5 square feet`` become ``5``."""
    match = _UNIT_IN_TEXT.search(answer)
    if match and re.search(r"[\d})]\Z", answer[: match.start()]):
        return answer[: match.start()]
    match = _UNIT_IN_CJK.search(answer)
    if match:
        return answer[: match.start()]
    match = _UNIT_IN_WORDS.search(answer)
    if match and not _IN_FORMULAS.intersection(re.split("[ /]", match["words"].lower())):
        return answer[: match.start()]
    return answer
