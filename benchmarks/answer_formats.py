r"""Right responses by construction: a reference answer in many formats.

`answer_templates` has the formats, `near_misses` writes wrong responses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import answer_templates as templates
from answer_references import MARKUP, MEASURED, Reference, brackets_of, decimal_of, digits_of, letter_of, value_of


@dataclass(frozen=True, slots=True)
class Output:
    """A response and its verdict."""

    format: str
    text: str
    right: bool


def right_outputs(reference: Reference) -> Iterator[Output]:
    """Right responses in every format that the reference can have, each once."""
    for name, around in templates.MARKS.items():
        yield Output(name, around.replace("@", reference.text), right=True)
    digits = digits_of(reference)
    for name, around in templates.PLAIN_MARKS.items() if digits else ():
        yield Output(name, around.replace("@", digits), right=True)
    carriers = (r"It is \boxed{@}.", "<answer>@</answer>", "Therefore, the final answer is: $@$.")
    for index, (name, written) in enumerate(_notations(reference)):
        # A dollar sign or words between dollars are no formula.
        count = 2 if re.search(r"(?<!\\)\$|(?<![\\{a-z])[a-z]{2,}|%$", written) else 3
        around = carriers[(index + len(reference.text)) % count]
        yield Output(f"X as {name}", around.replace("@", written), right=True)


def filled(table: Mapping[str, str], **parts: object) -> Iterator[tuple[str, str]]:
    """The notations of a table, with the parts of the answer in place of ``@`` and their letter."""
    for name, template in table.items():
        yield name, re.sub(r"@([a-z])", lambda found: str(parts[found[1]]), template)


def _notations(reference: Reference) -> Iterator[tuple[str, str]]:
    """Other LaTeX for the same answer."""
    yield from _NOTATIONS.get(reference.kind, _formula_notations)(reference)
    if reference.kind in ("whole", "decimal", "fraction"):
        yield from _with_units(reference)


def _number_notations(reference: Reference) -> Iterator[tuple[str, str]]:
    value = reference.value
    assert value is not None
    digits = digits_of(reference)
    tables = [templates.NUMBER, templates.NEGATIVE if value < 0 else templates.POSITIVE]
    if reference.kind == "whole":
        tables.append(templates.WHOLE)
    if reference.kind == "decimal" and "." in digits:
        tables.append(templates.DECIMAL)
        if abs(value) < 1:
            tables.append(templates.BELOW_ONE)
    parts = {"d": digits, "a": digits.removeprefix("-"), "f": digits.replace("0.", ".", 1), "v": value, "w": 2 * value}
    parts |= {"n": value.numerator, "m": value.denominator}
    for table in tables:
        yield from filled(table, **parts)
    if abs(value) >= 1000:
        whole, point, rest = digits.partition(".")
        for name, separator in templates.THOUSANDS_SEPARATORS.items():
            yield f"1{name}000", f"{int(whole):,}".replace(",", separator) + point + rest
        yield from filled(templates.SCIENTIFIC, k=decimal_of(value / 1000))


def _fraction_notations(reference: Reference) -> Iterator[tuple[str, str]]:
    value = reference.value
    assert value is not None
    sign, above, below = "-" if value < 0 else "", abs(value.numerator), value.denominator
    whole, rest = divmod(above, below)
    parts = {"s": sign, "n": above, "m": below, "i": 2 * above, "j": 2 * below, "q": whole, "r": rest}
    yield from filled(templates.FRACTION, **parts)
    if sign:
        yield from filled(templates.NEGATIVE_FRACTION, **parts)
    if above < 10 and below < 10:
        yield from filled(templates.ONE_DIGIT_FRACTION, **parts)
    if len(decimal := decimal_of(value)) in range(1, 8):
        yield "decimal", decimal
    if below > 1 and above > below:
        yield from filled(templates.MIXED, **parts)


def _with_units(reference: Reference) -> Iterator[tuple[str, str]]:
    digits, text = digits_of(reference), reference.text
    yield from filled(templates.UNITS, d=digits, t=text)
    if "." in digits or "/" not in digits:
        yield "$5", f"${digits}" if not digits.startswith("-") else rf"\${digits}"
        yield from filled(templates.PLAIN_UNITS, d=digits)


def _measured_notations(reference: Reference) -> Iterator[tuple[str, str]]:
    found = MEASURED.fullmatch(reference.text)
    assert found
    unit = (found["unit"] or "").strip()
    parts = {"d": found["number"].strip(), "e": reference.text[len(found["number"]) :].strip(), "u": unit}
    yield from filled(templates.MEASURED, **parts)
    if "circ" in reference.text:
        yield from filled(templates.DEGREES, **parts)
    if unit and reference.text.endswith("}"):
        yield from filled(templates.NAMED_UNIT, **parts)
        if re.fullmatch("[A-Za-z ]+", unit):
            yield from filled(templates.WORD_UNIT, **parts)


def _letter_notations(reference: Reference) -> Iterator[tuple[str, str]]:
    yield from filled(templates.LETTER, x=letter_of(reference))


def _words_notations(reference: Reference) -> Iterator[tuple[str, str]]:
    words = MARKUP.sub(r"\1", reference.text).strip()
    yield from filled(templates.WORDS, x=words, c=words[0].upper() + words[1:])


def _joined(table: Mapping[str, tuple[str, str, str]], parts: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name, (opening, separator, closing) in table.items():
        yield name, opening + separator.join(parts) + closing


def _tuple_notations(reference: Reference) -> Iterator[tuple[str, str]]:
    yield from _joined(templates.TUPLE, reference.parts)
    yield "a/b within", f"({', '.join(map(_slashed, reference.parts))})"
    yield r"\dfrac within", f"({', '.join(part.replace(r'\frac', r'\dfrac') for part in reference.parts)})"


def _slashed(part: str) -> str:
    value = value_of(part)
    return part if value is None or r"\frac" not in part else str(value)


def _set_notations(reference: Reference) -> Iterator[tuple[str, str]]:
    parts = reference.parts
    if reference.kind == "list":
        yield from _joined(templates.LIST, parts)
        if any(part[0] in "([" for part in parts):
            return
        yield r"a \text{ and } b", r" \text{ and } ".join([", ".join(parts[:-1]), parts[-1]])
    yield "{b, a}", r"\{" + ", ".join(reversed(parts)) + r"\}"
    yield from _joined(templates.SET, parts)
    yield "a/b within", r"\{" + ", ".join(map(_slashed, parts)) + r"\}"


def _interval_notations(reference: Reference) -> Iterator[tuple[str, str]]:
    opening, closing = brackets_of(reference)
    low, high = reference.parts
    plus = "+" if high == r"\infty" else ""
    yield from filled(templates.INTERVAL, o=opening, c=closing, l=low, h=high, p=plus)
    yield "∞", f"{opening}{low}, {high}{closing}".replace(r"\infty", "∞")


def _formula_notations(reference: Reference) -> Iterator[tuple[str, str]]:
    for name, (pattern, replacement) in templates.FORMULA.items():
        if (written := re.sub(pattern, replacement, reference.text)) != reference.text:
            yield name, written


_NOTATIONS: dict[str, Callable[[Reference], Iterator[tuple[str, str]]]] = {
    "whole": _number_notations,
    "decimal": _number_notations,
    "fraction": _fraction_notations,
    "measured": _measured_notations,
    "letter": _letter_notations,
    "words": _words_notations,
    "tuple": _tuple_notations,
    "set": _set_notations,
    "list": _set_notations,
    "interval": _interval_notations,
}
