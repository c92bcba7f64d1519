r"""Reads inequalities of one variable as intervals: ``x \ge 3`` as ``[3,\infty)``, so that both can be compared."""

from __future__ import annotations

import re
from typing import NamedTuple

_GREEK = r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|phi|omega)(?![a-z])"
_VARIABLE = re.compile(rf"(?:[A-Za-z]|{_GREEK})(?:_(?:\w|\{{\w+\}}))?")
_JOINED = re.compile(
    r"\s*(?:,\s*)?(?:\\(?:text|mbox|textrm|mathrm)\s*\{\s*(?P<text>and|or)\s*\}"
    r"|(?<![A-Za-z\\])(?P<word>and|or)(?![A-Za-z])|\\(?P<sign>lor|vee|land|wedge)(?![a-z]))\s*"
)
_AND = {"and", "land", "wedge"}
_BUILDER = re.compile(
    rf"\\\{{\s*{_VARIABLE.pattern}\s*(?:\\in\s*\\mathbb\s*\{{?\s*R\s*\}}?)?\s*(?:\\mid(?![a-z])|[|:])(?P<of>.+)\\\}}",
    re.DOTALL,
)
_RELATION = re.compile(r"\\(?:leq?|geq?|lt|gt|neq?|in)(?![a-z])|[<>=]")
_SIGNS = {
    r"\lt": "<", r"\le": "<=", r"\leq": "<=", r"\gt": ">", r"\ge": ">=", r"\geq": ">=", r"\ne": "!=", r"\neq": "!=",
}  # fmt: skip
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LIST = re.compile(r",|\\pm")
_EQUATION = re.compile(r"(?:[^\\<>]|\\(?!(?:[lg]eq?|[lg]t|neq?|in)(?![a-z])))+")
_LOWEST, _HIGHEST = r"-\infty", r"\infty"
_UPWARD, _DOWNWARD = f",{_HIGHEST})", f"({_LOWEST},"


class Region(NamedTuple):
    """The values that an answer allows for its variable."""

    variable: str
    sets: tuple[str, ...]
    """Intervals and other sets in LaTeX, whose union they are."""

    def __str__(self) -> str:
        return r"\cup ".join(self.sets)


def region(answer: str) -> Region | None:
    r"""The region of inequalities (``1 < x \le 2 or x > 5``), of ``x \in S`` or of ``\{x \mid x > 3\}``.

    None for anything else, such as relations between variables, equations, or a list of inequalities.
    """
    if not _RELATION.search(answer):
        return None
    built = _BUILDER.fullmatch(answer)
    text = built["of"] if built else answer
    joints = list(_JOINED.finditer(text))
    begins, ends = [0, *(each.end() for each in joints)], [*(each.start() for each in joints), len(text)]
    found = [_region(text[begin:end].strip()) for begin, end in zip(begins, ends, strict=True)]
    regions = [each for each in found if each is not None]
    if len(regions) < len(found) or len({each.variable for each in regions}) > 1 or _EQUATION.fullmatch(answer):
        return None
    if not any(each[each.lastgroup or 0] in _AND for each in joints):
        return Region(regions[0].variable, tuple(each for one in regions for each in one.sets))
    return _intersection(regions)


def _region(text: str) -> Region | None:
    signs = [_SIGNS.get(each, each) for each in _RELATION.findall(text)]
    sides = [each.strip() for each in _RELATION.split(text)]
    places = [place for place, side in enumerate(sides) if _VARIABLE.fullmatch(side)]
    if len(places) != 1 or not all(sides):
        return None
    place = places[0]
    variable, others = sides[place], sides[:place] + sides[place + 1 :]
    if signs == [r"\in"]:
        return Region(variable, (others[0],)) if place == 0 else None
    if any(
        variable in (each if len(variable) > 1 else _COMMAND.sub("", each)) or _LIST.search(each) for each in others
    ):
        return None
    if signs == ["!="]:
        return Region(variable, (f"{_DOWNWARD}{others[0]})", f"({others[0]}{_UPWARD}"))
    if signs == ["="]:
        return Region(variable, (rf"\{{{others[0]}\}}",))
    bounds = {}
    for at, (sign, value) in enumerate(zip(signs, others, strict=True)):
        if sign not in _FLIPPED:
            return None
        bounds[(sign if at >= place else _FLIPPED[sign])[0]] = f"{value}]" if "=" in sign else f"{value})"
    return Region(variable, (_interval(bounds),)) if len(bounds) == len(signs) else None


def _interval(bounds: dict[str, str]) -> str:
    """The interval between the bounds ``>`` and ``<``, which are values with a closing bracket."""
    low, high = bounds.get(">", rf"{_LOWEST})"), bounds.get("<", rf"{_HIGHEST})")
    return f"{'[' if low[-1] == ']' else '('}{low[:-1]},{high}"


def _intersection(regions: list[Region]) -> Region | None:
    """The interval between two rays; None for other regions."""
    rays = [each.sets[0] for each in regions if len(each.sets) == 1]
    upward = [each.removesuffix(_UPWARD) for each in rays if each.endswith(_UPWARD)]
    downward = [each.removeprefix(_DOWNWARD) for each in rays if each.startswith(_DOWNWARD)]
    if not len(upward) == len(downward) == 1 or len(regions) != 2:
        return None
    return Region(regions[0].variable, (f"{upward[0]},{downward[0]}",))
