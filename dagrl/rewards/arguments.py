r"""Writes arguments of LaTeX commands in braces: ``\dfrac12`` becomes ``\frac{1}{2}``, ``5 \choose 2`` a binomial."""

from __future__ import annotations

import re

_LONGEST = 10_000
"""Longest text that is converted, because braces within braces take quadratic time."""
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_NAMES = {
    **{rf"\{size}frac": r"\frac" for size in ("", "d", "t", "c")},
    **{rf"\{size}binom": r"\binom" for size in ("", "d", "t")},
}
"""Commands with two arguments, by the names of their sizes."""
_FONTS = {rf"\{name}" for name in ("text", "textrm", "textbf", "mathrm", "mathbf", "mathbb", "mathcal", "operatorname")}
_CHOOSE, _ROOT = r"\choose", r"\sqrt"


def with_braces(text: str) -> str:
    r"""The text with braces around the arguments of fractions, binomials, roots, and exponents that are commands."""
    if "\\" not in text or len(text) > _LONGEST:
        return text
    # From the right, so that what follows a command is complete. The last item is the leftmost one.
    items: list[str] = []
    closed: list[int] = []
    for token in reversed(_TOKEN.findall(text)):
        if token == "}":
            closed.append(len(items))
            items.append(token)
        elif token == "{" and closed:
            inside = items[closed[-1] + 1 :][::-1]
            del items[closed.pop() :]
            items.append(f"{{{_chosen(inside)}}}")
        elif token in _NAMES:
            items.append(_NAMES[token] + "".join(_argument(items, closed) for _ in range(2)))
        elif token == _ROOT:
            items.append(token + _degree(items, closed) + _argument(items, closed))
        elif token in _FONTS and items and _is_group(items[-1]):
            items.append(token + items.pop())
        elif token in ("^", "_") and items and items[-1].startswith(("\\frac", "\\binom", "\\sqrt")):
            items.append(token + _argument(items, closed))
        else:
            items.append(token)
    return _chosen(items[::-1])


def _chosen(items: list[str]) -> str:
    r"""The items of a group in order, as a binomial if ``\choose`` is among them."""
    if items.count(_CHOOSE) != 1:
        return "".join(
            item[1:-1] if item.startswith(r"{\binom") and before not in ("^", "_") else item
            for before, item in zip(["", *items], items, strict=False)
        )
    place = items.index(_CHOOSE)
    above, below = ("".join(each).strip() for each in (items[:place], items[place + 1 :]))
    return rf"\binom{{{above}}}{{{below}}}"


def _argument(items: list[str], closed: list[int]) -> str:
    """Take the next argument off the items; empty at the end of a group."""
    _skip_spaces(items)
    if not items or not (items[-1].isalnum() or len(items[-1]) > 1) or (closed and closed[-1] == len(items) - 1):
        return ""
    argument = items.pop()
    return argument if _is_group(argument) else f"{{{argument}}}"


def _is_group(item: str) -> bool:
    return item.startswith("{") and len(item) > 1


def _skip_spaces(items: list[str]) -> None:
    while items and items[-1].isspace():
        items.pop()


def _degree(items: list[str], closed: list[int]) -> str:
    """Take the degree of a root, in square brackets, off the items."""
    _skip_spaces(items)
    if not items or items[-1] != "[" or "]" not in items[closed[-1] if closed else 0 :]:
        return ""
    end = len(items) - 1 - items[::-1].index("]")
    taken = items[end:][::-1]
    del items[end:]
    return "".join(taken)
