"""Equality of answers: numbers exactly, lists by element, formulas by math-verify."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

from dagrl.rewards.final_answer import GSM8K_MARK, LONGEST_ANSWER, THINK_END, marked_part, written_alike
from dagrl.rewards.in_latex import in_latex, of_hundred
from dagrl.rewards.markup import unwrapped, without_unit
from dagrl.rewards.plain_number import plain_number

_JOINED = re.compile(
    r"\s*(?:,\s*)?(?:\\(?:text|mbox|textrm|mathrm)\s*\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*"
)
_SIZED = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)\s*(?=[()\[\]|]|\\[{}])")
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z](?:_(?:\w|\{\w+\}))?(?:\([a-z]\))?)\s*=(?P<value>[^=<>]+)")
_RELATION = re.compile(r"[=<>]|\\(?:[lg]eq?|neq?|in)(?![a-z])")
_IN_BASE = re.compile(r"(\d+)\s*_\s*\{?\s*(\d+)\s*\}?")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-z])")
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


def matches(response: str, answer: str) -> bool:
    r"""Whether the final answer of `response` equals the reference `answer`.

    The final answer is the marked part (`marked_part`) of up to `LONGEST_ANSWER` characters, or, without one, the last
    formula or number found by math-verify. The reference may also be a worked solution in GSM8K's form or a boxed
    answer. Raises ValueError for a reference without an answer.
    """
    response, answer = (_BESIDE_CJK.sub(" ", text.translate(_FULL_WIDTH)) for text in (response, answer))
    reference = _read(answer.rpartition(GSM8K_MARK)[2])
    if not reference:
        raise ValueError(f"the reference answer {answer[:80]!r} contains nothing to compare with")
    marked = marked_part(response)
    if marked is None:
        rest = response.rpartition(THINK_END)[2]
        return _found_by_math_verify(rest if re.search(r"\d", rest) else response, reference)
    if len(marked) > max(LONGEST_ANSWER, 4 * len(reference)):
        return False
    said = _read(marked)
    return bool(said) and same(reference, said)


def _read(answer: str) -> str:
    return unwrapped(in_latex(re.sub(r"\s+", " ", unwrapped(answer))))


def same(reference: str, said: str) -> bool:
    """Whether two answers in LaTeX, without marks around them, are equal."""
    if _as_text(reference) == _as_text(said):
        return True
    values = _values(reference, said)
    if values:
        return same(*values)
    numbers = plain_number(reference), plain_number(said)
    if numbers[0] and numbers[1]:
        return numbers[0].equals(numbers[1])
    in_base = _IN_BASE.fullmatch(reference), _IN_BASE.fullmatch(said)
    if in_base[0] and in_base[1]:
        return in_base[0].groups() == in_base[1].groups()
    ours, theirs = _elements(reference), _elements(said)
    if not _PLUS_MINUS.search(reference + said):
        if len(ours[1]) == len(theirs[1]) > 1:
            return _same_elements(*ours, *theirs)
        if any(numbers) and max(len(ours[1]), len(theirs[1])) > 1:
            return False
    return any(_verified(*pair) for pair in _with_percentages(without_unit(reference), without_unit(said)))


def _values(reference: str, said: str) -> tuple[str, str] | None:
    """Both without a leading name (``x = 5``), if the names are equal or only one has a name; None otherwise."""
    ours, theirs = _ASSIGNED.fullmatch(reference), _ASSIGNED.fullmatch(said)
    if ours and theirs:
        return (unwrapped(ours["value"]), unwrapped(theirs["value"])) if ours["name"] == theirs["name"] else None
    if ours and not _RELATION.search(said):
        return unwrapped(ours["value"]), said
    if theirs and not _RELATION.search(reference):
        return reference, unwrapped(theirs["value"])
    return None


def _as_text(answer: str) -> str:
    text = re.sub(r"\A\(([A-Za-z])\)\Z", r"\1", written_alike(answer) or answer)
    return text.casefold() if text.isalpha() else text


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
    return around, [unwrapped(element) for element in elements]


def _same_elements(around: str, elements: list[str], around_said: str, said: list[str]) -> bool:
    r"""Whether lists of equal length are equal: in order, unless the reference is a set or has no brackets.

    The answer may omit the brackets of a tuple or a set. Two elements in square brackets are an interval.
    """
    if around not in ("", r"\{\}"):
        interval = len(elements) == 2 and around != "()"
        if around_said not in ((around,) if interval else ("", "()") if len(elements) == 2 else ("", "()", "[]")):
            return False
        return all(same(*pair) for pair in zip(elements, said, strict=True))
    if around and around_said not in ("", around):
        return False
    left = list(said)
    for element in elements:
        equal = next((index for index, each in enumerate(left) if same(element, each)), None)
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


def _verified(reference: str, said: str) -> bool:
    from math_verify import verify

    return verify(_formula(reference), _formula(said), timeout_seconds=None)


def _found_by_math_verify(response: str, reference: str) -> bool:
    """Whether the last formula or number of a response without a marked answer equals the reference."""
    from math_verify import parse, verify

    found = parse(_MARKS.sub(" ", response), parsing_timeout=None)
    number = of_hundred(reference)
    readings = [without_unit(reference)] if number is None else [number, _hundredth(number)]
    return any(verify(_formula(each), found, timeout_seconds=None) for each in readings)


def _formula(answer: str) -> list[Any]:
    from math_verify import parse

    return parse(rf"\boxed{{{answer}}}", _whole_formula(), parsing_timeout=None)


@cache
def _whole_formula() -> list[Any]:
    """Extraction settings that read an answer as a whole, and keep units, which have been removed before."""
    from math_verify import LatexExtractionConfig

    normalization = replace(LatexExtractionConfig().normalization_config, units=False)
    return [LatexExtractionConfig(try_extract_without_anchor=False, normalization_config=normalization)]
