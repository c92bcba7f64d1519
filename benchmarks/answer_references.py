r"""Reference answers of math data sets, their kinds and exact values, which come from these rules and no grader."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_UNIT = r"(?:\s|\\[ ,;]|~)*(?:\\(?:text|mathrm|mbox|textrm)\s*\{(?P<unit>[^{}]*)\}(?:\^\{?\d\}?)?|\^\{?\\circ\}?|\\%)"
MEASURED = re.compile(rf"(?P<number>.*?){_UNIT}\.?", re.DOTALL)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))")
_DECIMAL = re.compile(r"\d*\.\d+|\d+")
_RATIO = re.compile(r"(\d+)\s*/\s*(\d+)")
POWER_OF_TEN = re.compile(r"(.*?)\s*\\(?:times|cdot)\s*10\s*\^\s*(?:\{\s*(-?\d+)\s*\}|(\d))")
MARKUP = re.compile(r"\\(?:text|mathrm|mbox|textbf|textrm)\s*\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference answer with its kind and value."""

    text: str
    """LaTeX, without dollars around it."""
    kind: str
    """whole, decimal, fraction, measured (with a unit), letter, words, tuple, set, list, interval or formula."""
    value: Fraction | None = None
    """The value of a number."""
    parts: tuple[str, ...] = ()
    """Elements of a tuple, a set or a list; ends of an interval."""


def read_reference(answer: str) -> Reference:
    """Read an answer of a data set, and find its kind."""
    text = answer.strip()
    if re.fullmatch(r"\$[^$]*[^$\\]\$", text):
        text = text[1:-1].strip()
    value = value_of(text)
    if value is not None:
        point = "." in text.rstrip(".")
        kind = "decimal" if point else "whole" if value.denominator == 1 else "fraction"
        return Reference(text, kind, value)
    measured = MEASURED.fullmatch(text)
    if measured and (value := value_of(measured["number"])) is not None:
        return Reference(text, "measured", value)
    said = MARKUP.sub(r"\1", text).strip()
    if re.fullmatch(r"\(?[A-Z]\)?", said):
        return Reference(text, "letter")
    if MARKUP.fullmatch(text) and re.fullmatch(r"[A-Za-z][A-Za-z ]+", said):
        return Reference(text, "words")
    return _with_parts(text)


def _with_parts(text: str) -> Reference:
    bare = re.sub(r"\\left\s*(?=[(\[{\\|])|\\right\s*(?=[)\]}\\|])", "", text).strip()
    brackets = re.fullmatch(r"(\\\{|[(\[])(.*?)(\\\}|[)\]])", bare, re.DOTALL)
    parts = _split(brackets[2]) if brackets else None
    if parts is None:
        # A list of tuples begins and ends with brackets, too.
        brackets, parts = None, _split(bare)
    if parts is None or len(parts) < 2 or any(word in bare for word in ("=", "matrix", "cup", r"\text", "$", "or")):
        return Reference(text, "formula")
    if brackets is None:
        return Reference(text, "list", parts=parts)
    opening, closing = brackets[1], brackets[3]
    if opening == r"\{" and closing == r"\}":
        return Reference(text, "set", parts=parts)
    if "[" in opening or "]" in closing or r"\infty" in bare:
        return Reference(text, "interval" if len(parts) == 2 else "formula", parts=parts)
    return Reference(text, "tuple", parts=parts)


def _split(text: str) -> tuple[str, ...] | None:
    """The text between commas that are in no bracket; None where brackets do not close."""
    depth, parts = 0, [""]
    for token in re.findall(r"\\.|.", text, re.DOTALL):
        depth += (token in ("(", "[", "{", r"\{")) - (token in (")", "]", "}", r"\}"))
        if depth < 0:
            return None
        if token == "," and not depth:
            parts.append("")
        else:
            parts[-1] += token
    stripped = tuple(part.strip() for part in parts)
    return stripped if depth == 0 and all(stripped) else None


def value_of(text: str) -> Fraction | None:
    """The number that a text is: whole, decimal, a fraction, or one of them times a power of ten; else None."""
    text = text.strip().removesuffix(".").replace(r"\$", "").replace(r"\!", "").replace("{,}", ",").strip()
    if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        text = text.replace(",", "")
    sign = -1 if text.startswith("-") else 1
    text = text.removeprefix("-").strip()
    if found := POWER_OF_TEN.fullmatch(text):
        mantissa = value_of(found[1])
        return None if mantissa is None else sign * mantissa * Fraction(10) ** int(found[2] or found[3])
    if _DECIMAL.fullmatch(text):
        return sign * Fraction(text)
    if found := _FRACTION.fullmatch(text):
        above, below = int(found[1] or found[2]), int(found[3] or found[4])
    elif found := _RATIO.fullmatch(text):
        above, below = int(found[1]), int(found[2])
    else:
        return None
    return Fraction(sign * above, below) if below else None


def digits_of(reference: Reference) -> str:
    """A number in digits, a point and a slash alone; empty for other kinds, and without such a notation."""
    if reference.kind not in ("whole", "decimal", "fraction") or reference.value is None:
        return ""
    return decimal_of(reference.value) if reference.kind == "decimal" else str(reference.value)


def decimal_of(value: Fraction) -> str:
    """A fraction with a finite decimal form, exactly; empty for another one."""
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    if below != 1:
        return ""
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
    digits = str(abs(value) * 10**places).rjust(places + 1, "0")
    point = f"{digits[: len(digits) - places]}.{digits[len(digits) - places :]}".rstrip(".")
    return ("-" if value < 0 else "") + point


def letter_of(reference: Reference) -> str:
    return MARKUP.sub(r"\1", reference.text).strip(" ()")


def brackets_of(reference: Reference) -> tuple[str, str]:
    bare = re.sub(r"\\(?:left|right)", "", reference.text).strip()
    return bare[0], bare[-1]
