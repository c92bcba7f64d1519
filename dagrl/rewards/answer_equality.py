"""Equality of answers: numbers exactly, lists by element, formulas by math-verify."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate, product
from typing import NamedTuple

from dagrl.rewards.final_answer import (
    ASSIGNED,
    GSM8K_MARK,
    LONGEST_ANSWER,
    THINK_END,
    marked_part,
    without_name,
    written_alike,
)
from dagrl.rewards.formulas import equal, parsed_formula, same_formula
from dagrl.rewards.in_latex import in_latex, of_hundred
from dagrl.rewards.markup import unwrapped, without_unit
from dagrl.rewards.plain_number import plain_number

_GREEK = r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|phi|omega)(?![a-z])"
_VARIABLE = re.compile(rf"(?:[A-Za-z]|{_GREEK})(?:_(?:\w|\{{\w+\}}))?")
_JOINTS = re.compile(
    r"\s*(?:,\s*)?(?:\\(?:text|mbox|textrm|mathrm)\s*\{\s*(?P<text>and|or)\s*\}"
    r"|(?<![A-Za-z\\])(?P<word>and|or)(?![A-Za-z])|\\(?P<sign>lor|vee|land|wedge)(?![a-z]))\s*"
)
_AND = {"and", "land", "wedge"}
_BUILDER = re.compile(
    rf"\\\{{\s*{_VARIABLE.pattern}\s*(?:\\in\s*\\mathbb\s*\{{?\s*R\s*\}}?)?\s*(?:\\mid(?![a-z])|[|:])(?P<of>.+)\\\}}",
    re.DOTALL,
)
_RELATIONS = re.compile(r"\\(?:leq?|geq?|lt|gt|neq?|in)(?![a-z])|[<>=]")
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
    if not _RELATIONS.search(answer):
        return None
    built = _BUILDER.fullmatch(answer)
    text = built["of"] if built else answer
    joints = list(_JOINTS.finditer(text))
    begins, ends = [0, *(joint.end() for joint in joints)], [*(joint.start() for joint in joints), len(text)]
    chains = [_region(text[begin:end].strip()) for begin, end in zip(begins, ends, strict=True)]
    regions = [one for one in chains if one is not None]
    if len(regions) < len(chains) or len({one.variable for one in regions}) > 1 or _EQUATION.fullmatch(answer):
        return None
    if not any(joint[joint.lastgroup or 0] in _AND for joint in joints):
        return Region(regions[0].variable, tuple(values for one in regions for values in one.sets))
    return _intersection(regions)


def _region(text: str) -> Region | None:
    signs = [_SIGNS.get(sign, sign) for sign in _RELATIONS.findall(text)]
    sides = [side.strip() for side in _RELATIONS.split(text)]
    places = [place for place, side in enumerate(sides) if _VARIABLE.fullmatch(side)]
    if len(places) != 1 or not all(sides):
        return None
    place = places[0]
    variable, others = sides[place], sides[:place] + sides[place + 1 :]
    if signs == [r"\in"]:
        return Region(variable, (others[0],)) if place == 0 else None
    if any(
        variable in (other if len(variable) > 1 else _COMMAND.sub("", other)) or _LIST.search(other) for other in others
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
    rays = [one.sets[0] for one in regions if len(one.sets) == 1]
    upward = [ray.removesuffix(_UPWARD) for ray in rays if ray.endswith(_UPWARD)]
    downward = [ray.removeprefix(_DOWNWARD) for ray in rays if ray.startswith(_DOWNWARD)]
    if not len(upward) == len(downward) == 1 or len(regions) != 2:
        return None
    return Region(regions[0].variable, (f"{upward[0]},{downward[0]}",))


_JOINED = re.compile(
    r"\s*(?:,\s*)?(?:\\(?:text|mbox|textrm|mathrm)\s*\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*"
)
_SIZED = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)\s*(?=[()\[\]|]|\\[{}])")
_RELATION = re.compile(r"[=<>]|\\(?:[lg]eq?|neq?|in)(?![a-z])")
_IN_BASE = re.compile(r"(\d+)\s*_\s*\{?\s*(\d+)\s*\}?")
_PLUS, _MINUS_PLUS = re.compile(r"\\pm(?![a-z])"), re.compile(r"\\mp(?![a-z])")
_PLUS_MINUS = re.compile(rf"{_PLUS.pattern}|{_MINUS_PLUS.pattern}")
_POINTS = re.compile(r"[A-Z]{2,}")
"""Points of a line or a polygon, or choices: their order counts, while that of factors does not."""
_SET = re.compile(r"[(\[\\<>]")
_SEGMENT = re.compile(r"\\overline\{([A-Z]+)\}")
_QUOTED_LIST = re.compile(r"""\s*\[\s*["'].*["']\s*\]\s*""", re.DOTALL)
_BESIDE_CJK = re.compile(r"(?<=[\u3000-\u30ff\u3400-\u9fff])(?=[-−+$€£¥]?\d)|(?<=\d)(?=[\u3400-\u9fff])")
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {ord("￥"): ord("¥")}
"""Chinese and Japanese write digits, brackets and signs as wide as their letters, and no space around a number."""
_MARKS = re.compile(
    r"(?<!\S)[*_`\"'“‘(\[~≈→]+(?=[-−+]?[$€£¥]?\d)|(?<=[^\d\s][:>→~≈])(?=[-−+]?[$€£¥]?\d)"
    r"|(?<=\d)[*_`\"'”’]+(?=[\s.,;:!?)\]]|\Z)"
)
"""Markup, quotes and colons at a number, beside which math-verify overlooks it and takes an earlier one."""
_TOKEN = re.compile(r"\\.|.", re.DOTALL)
_BRACKETS = {"(", "[", r"\{"}
_OPENING, _CLOSING = {*_BRACKETS, "{"}, {")", "]", r"\}", "}"}


def matches(response: str, answer: str, *, strict: bool = False, cut: bool = False) -> bool:
    r"""Whether the final answer of `response` equals the reference `answer`.

    The final answer is the marked part (`marked_part`) of up to `LONGEST_ANSWER` characters, or, without one, the last
    formula or number found by math-verify. The reference may also be a worked solution in GSM8K's form or a boxed
    answer. If `strict`, only a number counts, in a box, in ``<answer>`` or after ``####``: ``9+9`` and ``36/2`` are no
    18, and neither is a number at the end of a response that was `cut`. Raises ValueError for a reference without an
    answer, or, if `strict`, without a number.
    """
    response, answer = (_BESIDE_CJK.sub(" ", text.translate(_FULL_WIDTH)) for text in (response, answer))
    reference = _read_reference(answer.rpartition(GSM8K_MARK)[2])
    if not reference:
        raise ValueError(f"the reference answer {answer[:80]!r} contains nothing to compare with")
    if strict and plain_number(reference) is None:
        raise ValueError(f"the reference answer {answer[:80]!r} is no number; remove `strict`")
    marked = marked_part(response, strict=strict, cut=strict and cut)
    if strict and (marked is None or not _is_computed(_read(marked))):
        return False
    if marked is None:
        rest = response.rpartition(THINK_END)[2]
        return _found_by_math_verify(rest if re.search(r"\d", rest) else response, reference)
    if len(marked) > max(LONGEST_ANSWER, 4 * len(reference)):
        return False
    said = _read(marked)
    return bool(said) and same(reference, said)


def _is_computed(answer: str) -> bool:
    """Whether an answer is a number, and no division that is left to do."""
    answer = without_name(answer)
    number = plain_number(answer)
    return number is not None and not (number.value.denominator == 1 and re.search(r"/|\\frac", answer))


def _read_reference(answer: str) -> str:
    """A reference, which may be a list of texts in JSON or Python: several answers, or one in several forms."""
    elements = [answer]
    if _QUOTED_LIST.fullmatch(answer):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            elements = [str(text) for text in ast.literal_eval(answer.strip())]
    different: list[str] = []
    for element in map(_read, elements):
        if not any(same(other, element) for other in different):
            different.append(element)
    return ", ".join(different)


def _read(answer: str) -> str:
    return unwrapped(in_latex(re.sub(r"\s+", " ", unwrapped(answer))))


def same(reference: str, said: str) -> bool:
    """Whether two answers in LaTeX, without marks around them, are equal."""
    texts = _as_text(reference), _as_text(said)
    if texts[0] == texts[1] or (texts[0].isalpha() and texts[0].casefold() == texts[1].casefold()):
        return True
    if all(map(_POINTS.fullmatch, texts)):
        return False
    values = _values(reference, said)
    if values:
        return same(*values)
    regions = region(reference), region(said)
    if any(regions):
        return _same_regions(reference, said, *regions)
    numbers = plain_number(reference), plain_number(said)
    if numbers[0] and numbers[1]:
        return numbers[0].equals(numbers[1])
    in_base = _IN_BASE.fullmatch(reference), _IN_BASE.fullmatch(said)
    if in_base[0] and in_base[1]:
        return in_base[0].groups() == in_base[1].groups()
    ours, theirs = _elements(reference), _elements(said)
    if len(ours[1]) == len(theirs[1]) > 1:
        return _same_elements(*ours, *theirs)
    if any(numbers) and max(len(ours[1]), len(theirs[1])) > 1:
        return False
    return any(same_formula(*pair) for pair in _with_percentages(without_unit(reference), without_unit(said)))


def _values(reference: str, said: str) -> tuple[str, str] | None:
    """Both without a leading name (``x = 5``), if the names are equal or only one has a name; None otherwise."""
    ours, theirs = ASSIGNED.fullmatch(reference), ASSIGNED.fullmatch(said)
    if ours and theirs:
        comparable = ours["name"] == theirs["name"]
    else:
        comparable = bool((ours and not _RELATION.search(said)) or (theirs and not _RELATION.search(reference)))
    return (without_name(reference), without_name(said)) if comparable else None


def _same_regions(reference: str, said: str, ours: Region | None, theirs: Region | None) -> bool:
    """Whether answers of which at least one is a region allow the same values."""
    if ours and theirs and ours.variable != theirs.variable:
        return False
    values = str(ours or reference), str(theirs or said)
    # Bare numbers are elements of a set, but no interval.
    if any(value.startswith(("(", "[")) for value in values) and not all(map(_SET.search, values)):
        return False
    return same(*values)


def _as_text(answer: str) -> str:
    text = _SEGMENT.sub(r"\1", written_alike(answer) or answer)
    return re.sub(r"\A\(([A-Za-z])\)\Z", r"\1", text)


def _elements(answer: str) -> tuple[str, list[str]]:
    r"""The brackets around an answer (``(]``, ``\{\}`` or empty) and its elements separated by commas."""
    tokens = _TOKEN.findall(_JOINED.sub(", ", _SIZED.sub("", answer)).strip())
    depths = list(accumulate((token in _OPENING) - (token in _CLOSING) for token in tokens))
    if not tokens or min(depths) < 0 or depths[-1] != 0:
        return "", [answer]
    around = ""
    if tokens[0] in _BRACKETS and 0 not in depths[:-1]:
        around = tokens[0] + tokens[-1]
        tokens, depths = tokens[1:-1], [depth - 1 for depth in depths[1:-1]]
    elements = [""]
    for token, depth in zip(tokens, depths, strict=True):
        if token == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += token
    if around not in ("", r"\{\}"):
        # A tuple with a sign of both kinds is two tuples, and no element of it is two elements.
        return ("", _signed(answer)) if _PLUS_MINUS.search(answer) else (around, list(map(unwrapped, elements)))
    return around, [unwrapped(value) for element in elements for value in _signed(element)]


def _signed(element: str) -> list[str]:
    r"""The two values of an element with ``\pm``, first that with the upper sign; otherwise the element."""
    if not _PLUS_MINUS.search(element):
        return [element]
    return [_MINUS_PLUS.sub(other, _PLUS.sub(upper, element)) for upper, other in ("+-", "-+")]


def _same_elements(around: str, elements: list[str], around_said: str, said: list[str]) -> bool:
    r"""Whether lists of equal length are equal: in order, unless the reference is a set or has no brackets.

    The answer may omit the brackets of a tuple, a set, a list, or a closed interval, which looks like a list.
    """
    if around not in ("", r"\{\}"):
        interval = len(elements) == 2 and around != "()"
        bare = "" if around == "[]" else around
        if around_said not in ((around, bare) if interval else ("", "()") if len(elements) == 2 else ("", "()", "[]")):
            return False
        return all(same(*pair) for pair in zip(elements, said, strict=True))
    if around and around_said not in ("", around):
        return False
    left = list(said)
    for element in elements:
        equal = next((index for index, other in enumerate(left) if same(element, other)), None)
        if equal is None:
            return False
        del left[equal]
    return True


def _with_percentages(reference: str, said: str) -> Iterator[tuple[str, str]]:
    """Pairs to compare: without the percent sign if both have it, otherwise in both readings."""
    ours, theirs = of_hundred(reference), of_hundred(said)
    yield ours or reference, theirs or said
    if ours and not theirs:
        yield _hundredth(ours), said
    elif theirs and not ours:
        yield reference, _hundredth(theirs)


def _hundredth(number: str) -> str:
    return rf"\frac{{{number}}}{{100}}"


def _found_by_math_verify(response: str, reference: str) -> bool:
    """Whether the last formula or number of a response without a marked answer equals the reference."""
    from math_verify import parse
    from sympy import Basic

    formulas = parse(_MARKS.sub(" ", response), parsing_timeout=None)
    number = of_hundred(reference)
    readings = [without_unit(reference)] if number is None else [number, _hundredth(number)]
    wanted = [formula for formula in map(parsed_formula, readings) if formula is not None]
    return any(equal(*pair) for pair in product(wanted, formulas) if isinstance(pair[1], Basic))
