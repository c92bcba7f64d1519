r"""The final answer of a response: the text in its last ``\boxed{}`` or ``<answer>``, after ``####`` or "answer is"."""

from __future__ import annotations

import re
from collections import deque

from dagrl.rewards.in_latex import in_latex
from dagrl.rewards.markup import closing_braces, unwrapped
from dagrl.rewards.plain_number import plain_number

ANSWER, ANSWER_END = "<answer>", "</answer>"
THINK_END = "</think>"
GSM8K_MARK = "####"
LONGEST_ANSWER = 1000
"""Longest answer in characters; longer ones are repetitions rather than answers."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>-?\d+(?:\.\d+)?))")
_DIGIT = re.compile(r"\d")
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")
_SPACING = re.compile(r"(?:\\[,;:! $]|\\(?:left|right|displaystyle)(?![a-z])|[\s$~])+")
_SHORT_BRACES = re.compile(r"([\^_])\{(\w+)\}")
ASSIGNED = re.compile(r"(?P<name>[A-Za-z](?:_(?:\w|\{\w+\}))?(?:\([a-z]\))?)\s*=(?P<value>[^=<>]+)")
"""A value with the name of a variable or a function."""
_IN_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|textrm|textit|mathit|boldsymbol)\s*\{([^{}]*)\}")

_STATED_WITHIN = 10_000
"""Number of last characters that are searched for "answer is", because the search is slow in long responses."""
_STATED = re.compile(r"\banswer\b[^\n.$\\\d:=]{0,60}?(?:\bis\b|\bare\b|[:=])[:\s*]*", re.IGNORECASE)
_FORMULA = r"(?:\$\$.+?\$\$|\$(?:[^$\n\\]|\\[^\n])+\$(?!\d)|\\\(.+?\\\)|\\\[.+?\\\])"
_FORMULAS = re.compile(rf"{_FORMULA}(?:\s*(?:,\s*(?:(?:and|or)\b\s*)?|(?:and|or)\b\s*){_FORMULA})*", re.DOTALL)
_SENTENCE = re.compile(r"(?:[^\n.;?]|\.(?=\d))*")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_IN_FORMULAS = {"and", "or", "pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "infinity", "inf"}
# Atomic, so that part of a longer number or expression (5.7x, 5, 7-2) does not match.
_LEADING_NUMBER = re.compile(
    r"(?>[-+−]?\s?\\?[$€£]?\d+(?:[, \u00a0\u2009\u202f]\d{3}(?!\d))*(?:\.\d+)?(?:\s\d+/\d+|\s*/\s*\d+)?(?:\s?\\?%)?)"
    r"(?=[\s,:!)*]|\Z)(?!\s*[-+*/^=<>×\\(])"
)


def marked_part(response: str, *, strict: bool = False, cut: bool = False) -> str | None:
    r"""The part of a response that is marked as its final answer; None without one.

    The content of the last ``\boxed{...}`` (or ``\fbox``) that is closed and not empty, or ``<answer>...</answer>``,
    whichever begins later; else the word after GSM8K's ``####`` at the end of a line, or a number and its unit; else,
    unless `strict`, the statement after the last "answer is" or "Answer:". Reasoning up to ``</think>`` is searched
    only if nothing is marked after it. The last line of a response that is `cut` has no complete word after ``####``.
    """
    _, thought, rest = response.rpartition(THINK_END)
    marked = _marked(rest, strict, cut)
    return _marked(response, strict, cut) if marked is None and thought else marked


def _marked(response: str, strict: bool, cut: bool) -> str | None:
    before, mark, inside = response.rpartition(ANSWER_END)[0].rpartition(ANSWER)
    inside = inside.strip() if mark else ""
    box = _last_box(response)
    if box is not None and (not inside or box[0] > len(before)):
        return box[1]
    return inside or _behind_gsm8k_mark(response, cut) or (None if strict else _stated(response))


def _last_box(text: str) -> tuple[int, str] | None:
    """Start and content of the last box that is closed and not empty; None without one."""
    closing = closing_braces(text)
    for box in reversed(list(_BOX.finditer(text))):
        end = closing.get(box.end() - 1)
        inside = box["bare"] or (text[box.end() : end].strip() if end is not None else "")
        if inside and (len(inside) > LONGEST_ANSWER or unwrapped(inside)):
            return box.start(), inside
    return None


def _last_match(pattern: re.Pattern[str], text: str, start: int = 0) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text, max(start, 0)), maxlen=1)), None)


def _behind_gsm8k_mark(response: str, cut: bool) -> str | None:
    # The mark and the answer end a line; other lines that begin with the mark may be Markdown headings.
    lines = response.split("\n")
    for line in reversed(lines[:-1] if cut else lines):
        _, mark, behind = line.rpartition(GSM8K_MARK)
        words = behind.split() if mark else []
        if len(words) == 1 and _DIGIT.search(words[0]):
            return words[0].strip("*_`")
        if len(words) == 2 and _NUMBER.fullmatch(words[0].strip("*$")) and words[1].islower():
            return " ".join(words)
    return None


def _stated(response: str) -> str | None:
    """The statement after the last "answer is": formulas, a short formula without dollars, a number or one word."""
    last = _last_match(_STATED, response, len(response) - _STATED_WITHIN)
    if last is None:
        return None
    formulas = _FORMULAS.match(response, last.end())
    if formulas:
        return formulas[0]
    match = _SENTENCE.match(response, last.end(), last.end() + LONGEST_ANSWER)
    sentence = match[0].strip() if match else ""
    words = [word for word in _WORD.findall(sentence) if word.lower() not in _IN_FORMULAS]
    if not words or words == [sentence.strip("*")]:
        return sentence or None
    number = None if "=" in sentence else _LEADING_NUMBER.match(sentence)
    return number[0] if number else None


def final_answer(response: str, *, strict: bool = False) -> str | None:
    r"""The final answer in a normal form, which does not depend on notation.

    It is the marked part, else the last number; None without either. Spacing, ``$``, ``\text{}``, a name (``x = 5``),
    a unit, commas in numbers, trailing zeros, braces and what `in_latex` normalises make no difference; ``1/2`` and
    ``\frac{1}{2}`` are equal, and so is ``0.5``. If `strict`, only a marked number is an answer.
    """
    marked = marked_part(response, strict=strict)
    if marked is None:
        numbers = [] if strict else _NUMBER.findall(response)
        marked = numbers[-1] if numbers else ""
    answer = without_name(unwrapped(in_latex(unwrapped(marked[:LONGEST_ANSWER]))))
    number = plain_number(answer)
    if number is None:
        return None if strict else written_alike(answer)
    return f"{number.value}%" if number.percent else str(number.value)


def without_name(answer: str) -> str:
    """The value of an answer such as ``x = 5``; any other answer as it is."""
    assigned = ASSIGNED.fullmatch(answer)
    return unwrapped(assigned["value"]) if assigned else answer


def written_alike(answer: str) -> str | None:
    """A normal form for answers that differ in spacing, fonts and notation of fractions and thousands."""
    answer = _SPACING.sub(_digits_apart, _IN_TEXT.sub(r"\1", answer)).rstrip(".")
    answer = _SHORT_BRACES.sub(r"\1\2", answer).replace(r"\%", "%")
    if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", answer):
        answer = answer.replace(",", "")
    if re.fullmatch(r"-?\d+\.\d*", answer):
        answer = answer.rstrip("0").rstrip(".")
    return answer or None


def _digits_apart(space: re.Match[str]) -> str:
    around = space.string[max(space.start() - 1, 0) : space.start()] + space.string[space.end() : space.end() + 1]
    return " " if len(around) == 2 and around.isdigit() else ""
