r"""Wrong responses by construction: near misses of a reference answer, without those that could equal it by chance."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

import answer_templates as templates
from answer_formats import Output, filled
from answer_references import MARKUP, POWER_OF_TEN, Reference, brackets_of, decimal_of, digits_of, letter_of, value_of

_WORDS = ("Monday", "Tuesday", "Evelyn", "Navin", "even", "odd", "hyperbola")


def wrong_outputs(reference: Reference, other: Reference | None) -> Iterator[Output]:
    """Wrong responses; `other` is the reference of another question."""
    misses = list(_near_misses(reference))
    if other is not None and _is_different(reference, other):
        misses.append(("another reference", other.text))
    marks = templates.WRONG_MARKS
    for index, (name, written) in enumerate(misses):
        around = marks[(index + len(reference.text)) % len(marks)]
        yield Output(name, around.replace("@", written), right=False)
    yield Output(r"empty \boxed{}", r"I am not sure. \boxed{}", right=False)
    yield Output("empty <answer>", "I am not sure. <answer> </answer>", right=False)
    yield Output("no answer", "I do not know how to solve this.", right=False)
    if misses:
        wrong = misses[len(reference.text) % len(misses)][1]
        yield Output("right, then wrong box", rf"It is ${reference.text}$. No: \boxed{{{wrong}}}", right=False)
        yield Output("right box, then wrong box", rf"\boxed{{{reference.text}}}, or rather, if I look at it again and "
                     rf"count everything anew, I get this instead: \boxed{{{wrong}}}", right=False)  # fmt: skip
        yield Output("right thought, wrong answer", rf"<think>So \boxed{{{reference.text}}}</think>"
                     f"<answer>{wrong}</answer>", right=False)  # fmt: skip


def _is_different(reference: Reference, other: Reference) -> bool:
    if reference.value is not None and other.value is not None:
        return other.kind == reference.kind and _differs(reference, other.value)
    if reference.kind == other.kind == "letter":
        return letter_of(reference) != letter_of(other)
    return (
        reference.value is None
        and other.value is not None
        and reference.kind in ("tuple", "interval", "words", "letter")
    )


def _differs(reference: Reference, value: Fraction) -> bool:
    """Whether a number differs from the reference, even if one of the two is read as a percentage."""
    right = reference.value
    assert right is not None
    readings = (right, right * 100, right / 100)
    # Decimals may be compared to a few digits.
    return all(abs(value - reading) > min(abs(reading), Fraction(1)) / 30_000 for reading in readings)


def _near_misses(reference: Reference) -> Iterator[tuple[str, str]]:
    if reference.value is not None:
        yield from _wrong_numbers(reference)
    elif reference.kind == "letter":
        letter = letter_of(reference)
        another = "ABCDE"["ABCDE".find(letter) - 1]
        if another != letter:
            yield "another letter", rf"\text{{({another})}}"
            yield "another letter, bare", another
    elif reference.kind == "words":
        said = MARKUP.sub(r"\1", reference.text).strip().lower()
        yield "another word", next(rf"\text{{{word}}}" for word in _WORDS if word.lower() != said)
        yield "not", rf"\text{{not {said}}}"
    elif reference.kind == "interval":
        yield from _wrong_intervals(reference)
    elif reference.parts:
        yield from _wrong_parts(reference)
    else:
        yield from _wrong_formulas(reference)


def _wrong_numbers(reference: Reference) -> Iterator[tuple[str, str]]:
    value = reference.value
    assert value is not None
    above, below = value.numerator, value.denominator
    numbers = {
        "one more": value + 1,
        "one less": value - 1,
        "sign": -value,
        "ten times": value * 10,
        "half more": value + Fraction(1, 2),
    }
    if below > 1:
        numbers |= {"numerator + 1": Fraction(above + 1, below), "denominator + 1": Fraction(above, below + 1)}
    if below > 1 and above:
        numbers["swapped"] = 1 / value
    for name, number in numbers.items():
        if _differs(reference, number):
            yield name, _written(number, reference.kind)
            yield f"{name}, with a unit", _written(number, reference.kind) + r"\text{ cm}"
    if below > 1 and abs(above) > below:
        whole, rest = divmod(abs(above), below)
        if _differs(reference, Fraction(int(f"{whole}{rest}"), below)):
            yield "3 1/2 without its space", f"{whole}{rest}/{below}"
        if _differs(reference, Fraction(whole * rest, below)):
            yield "mixed number as a product", rf"\frac{{{whole * rest}}}{{{below}}}"
    digits = digits_of(reference)
    if not digits:
        return
    longer = digits + "1" if "." in digits or "/" in digits else f"{digits}7"
    if value and _differs(reference, Fraction(longer)):
        yield "one digit more", longer
    nearby = {name: _written(value + step, reference.kind) for name, step in {"b": -2, "a": 2, "c": 3}.items()}
    yield from filled(templates.WRONG_NUMBER, d=digits, **nearby)
    yield r"n\sqrt{2}", rf"{'(' + digits + ')'}\sqrt{{2}}" if value else r"\sqrt{2}"
    if value:
        yield r"n\pi", rf"{digits}\pi" if "/" not in digits else rf"({digits})\pi"
    if abs(value) >= 1000 and reference.kind == "whole":
        yield (
            "last thousand only",
            f"{abs(value) // 1000}" if _differs(reference, Fraction(abs(value) // 1000)) else "1.5",
        )
        yield "a thousand more", f"{int(value) + (1000 if value > 0 else -1000):,}".replace(",", " ")
    if reference.kind == "decimal" and "." in digits:
        last = digits[:-1] + str((int(digits[-1]) + 1) % 10)
        if _differs(reference, Fraction(last)):
            yield "last digit", last
    if value and (scaled := POWER_OF_TEN.fullmatch(reference.text.lstrip("-"))):
        mantissa = value_of(scaled[1])
        assert mantissa is not None
        yield "another mantissa", reference.text.replace(scaled[1], decimal_of(mantissa + 1), 1)
        yield "another exponent", re.sub(r"10\s*\^\s*\{?(-?)", r"10^{\g<1>1", reference.text).rstrip("}") + "}"


def _written(value: Fraction, kind: str) -> str:
    if kind in ("decimal", "measured") and (decimal := decimal_of(value)):
        return decimal
    sign = "-" if value < 0 else ""
    return str(value) if value.denominator == 1 else rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _wrong_parts(reference: Reference) -> Iterator[tuple[str, str]]:
    parts = list(reference.parts)
    opening, closing = {"set": (r"\{", r"\}"), "tuple": ("(", ")")}.get(reference.kind, ("", ""))

    def written(some: list[str]) -> str:
        return f"{opening}{', '.join(some)}{closing}"

    values = [value_of(part) for part in parts]
    numbers = [value for value in values if value is not None]
    if len(numbers) == len(parts) and len(set(numbers)) == len(numbers):
        if len(parts) > 2 or reference.kind != "tuple":
            yield "one element less", written(parts[:-1])
        yield "one element more", written([*parts, str(int(max(numbers)) + 7)])
        last = numbers[-1] + 1
        if last not in numbers:
            yield "last element + 1", written([*parts[:-1], _written(last, "fraction")])
        first = numbers[0] - 1
        if first not in numbers:
            yield "first element - 1", written([_written(first, "fraction"), *parts[1:]])
        if reference.kind == "tuple":
            yield "two elements swapped", written([parts[1], parts[0], *parts[2:]])
        yield "only an element", parts[-1]
        yield "only the first element", parts[0]
    elif reference.kind == "tuple":
        yield "only an element", parts[0]
        yield "one element more", written([*parts, "7"])


def _wrong_intervals(reference: Reference) -> Iterator[tuple[str, str]]:
    opening, closing = brackets_of(reference)
    low, high = reference.parts
    if "infty" not in low:
        yield "other left bracket", f"{'(' if opening == '[' else '['}{low}, {high}{closing}"
    if "infty" not in high:
        yield "other right bracket", f"{opening}{low}, {high}{')' if closing == ']' else ']'}"
    for name, index in (("left end - 1", 0), ("right end + 1", 1)):
        value = value_of(reference.parts[index])
        if value is not None:
            ends = [low, high]
            ends[index] = _written(value + (1 if index else -1), "fraction")
            yield name, f"{opening}{ends[0]}, {ends[1]}{closing}"
    yield "only an end", high if "infty" not in high else low


def _wrong_formulas(reference: Reference) -> Iterator[tuple[str, str]]:
    text = reference.text
    scalar = not re.search(
        r"[,=<>]|\\(?:text|mathrm|mbox|in|cup|le|ge|leq|geq|begin|pm|infty|circ|ne|mathbb)(?![a-z])|_|[$:;]", text
    )
    if scalar:
        yield "formula + 1", f"{text}+1"
        yield "formula - 2", f"{text} - 2"
        if re.search(r"\\(?:pi|sqrt)|\d", text) and not text.startswith("0"):
            yield "twice the formula", rf"2 \left({text}\right)"
    elif re.fullmatch(r"[^=<>,]*=[^=<>,]*", text) and "text" not in text:
        yield "equation + 1", f"{text} + 1"
    elif found := re.fullmatch(r"(\d+)_\{?(\d+)\}?\.?", text):
        if len(found[1]) > 1:
            yield "another base", f"{found[1]}_{{{int(found[2]) + 1}}}"
        yield "another digit", f"{found[1]}1_{{{found[2]}}}"
    elif "matrix" in text and (found := re.search(r"(?<![\w./])\d+(?![\w./])", text)):
        yield "one entry + 1", f"{text[: found.start()]}{int(found[0]) + 1}{text[found.end() :]}"
