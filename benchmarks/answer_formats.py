r"""Model outputs whose verdict is known by construction: a reference answer in many formats, and near misses.

The value of an answer comes from exact rules (`Reference`), never from the grader under test. A near miss that could
equal the reference by chance is left out. `answer_templates` has the formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import answer_templates as templates

_UNIT = r"(?:\s|\\[ ,;]|~)*(?:\\(?:text|mathrm|mbox|textrm)\s*\{(?P<unit>[^{}]*)\}(?:\^\{?\d\}?)?|\^\{?\\circ\}?|\\%)"
_MEASURED = re.compile(rf"(?P<number>.*?){_UNIT}\.?", re.DOTALL)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))")
_DECIMAL = re.compile(r"\d*\.\d+|\d+")
_RATIO = re.compile(r"(\d+)\s*/\s*(\d+)")
_POWER_OF_TEN = re.compile(r"(.*?)\s*\\(?:times|cdot)\s*10\s*\^\s*(?:\{\s*(-?\d+)\s*\}|(\d))")
_MARKUP = re.compile(r"\\(?:text|mathrm|mbox|textbf|textrm)\s*\{([^{}]*)\}")
_WORDS = ("Monday", "Tuesday", "Evelyn", "Navin", "even", "odd", "hyperbola")


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference answer, and what is certain about it."""

    text: str
    """In LaTeX, without dollars around."""
    kind: str
    """whole, decimal, fraction, measured (with a unit), letter, words, tuple, set, list, interval or formula."""
    value: Fraction | None = None
    """Of a number."""
    parts: tuple[str, ...] = ()
    """Elements of a tuple, a set or a list; ends of an interval."""


@dataclass(frozen=True, slots=True)
class Output:
    """A response and its verdict."""

    format: str
    text: str
    right: bool


def read_reference(answer: str) -> Reference:
    """The answer of a data set with the kind it is of."""
    text = answer.strip()
    if re.fullmatch(r"\$[^$]*[^$\\]\$", text):
        text = text[1:-1].strip()
    value = value_of(text)
    if value is not None:
        point = "." in text.rstrip(".")
        kind = "decimal" if point else "whole" if value.denominator == 1 else "fraction"
        return Reference(text, kind, value)
    measured = _MEASURED.fullmatch(text)
    if measured and (value := value_of(measured["number"])) is not None:
        return Reference(text, "measured", value)
    said = _MARKUP.sub(r"\1", text).strip()
    if re.fullmatch(r"\(?[A-Z]\)?", said):
        return Reference(text, "letter")
    if _MARKUP.fullmatch(text) and re.fullmatch(r"[A-Za-z][A-Za-z ]+", said):
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
    if found := _POWER_OF_TEN.fullmatch(text):
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


def right_outputs(reference: Reference) -> Iterator[Output]:
    """Right responses in every format that the reference can have, each once."""
    for name, around in templates.MARKS.items():
        yield Output(name, around.replace("@", reference.text), right=True)
    digits = _digits(reference)
    for name, around in templates.PLAIN_MARKS.items() if digits else ():
        yield Output(name, around.replace("@", digits), right=True)
    carriers = (r"It is \boxed{@}.", "<answer>@</answer>", "Therefore, the final answer is: $@$.")
    for index, (name, written) in enumerate(_notations(reference)):
        # A dollar sign or words between dollars are no formula.
        count = 2 if re.search(r"(?<!\\)\$|(?<![\\{a-z])[a-z]{2,}|%$", written) else 3
        around = carriers[(index + len(reference.text)) % count]
        yield Output(f"X as {name}", around.replace("@", written), right=True)


def _digits(reference: Reference) -> str:
    """A number in digits, a point and a slash alone; empty for other kinds, and without such a notation."""
    if reference.kind not in ("whole", "decimal", "fraction") or reference.value is None:
        return ""
    return _decimal(reference.value) if reference.kind == "decimal" else str(reference.value)


def _decimal(value: Fraction) -> str:
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


def _filled(table: Mapping[str, str], **parts: object) -> Iterator[tuple[str, str]]:
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
    digits = _digits(reference)
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
        yield from _filled(table, **parts)
    if abs(value) >= 1000:
        whole, point, rest = digits.partition(".")
        for name, separator in templates.THOUSANDS_SEPARATORS.items():
            yield f"1{name}000", f"{int(whole):,}".replace(",", separator) + point + rest
        yield from _filled(templates.SCIENTIFIC, k=_decimal(value / 1000))


def _fraction_notations(reference: Reference) -> Iterator[tuple[str, str]]:
    value = reference.value
    assert value is not None
    sign, above, below = "-" if value < 0 else "", abs(value.numerator), value.denominator
    whole, rest = divmod(above, below)
    parts = {"s": sign, "n": above, "m": below, "i": 2 * above, "j": 2 * below, "q": whole, "r": rest}
    yield from _filled(templates.FRACTION, **parts)
    if sign:
        yield from _filled(templates.NEGATIVE_FRACTION, **parts)
    if above < 10 and below < 10:
        yield from _filled(templates.ONE_DIGIT_FRACTION, **parts)
    if len(decimal := _decimal(value)) in range(1, 8):
        yield "decimal", decimal
    if below > 1 and above > below:
        yield from _filled(templates.MIXED, **parts)


def _with_units(reference: Reference) -> Iterator[tuple[str, str]]:
    digits, text = _digits(reference), reference.text
    yield from _filled(templates.UNITS, d=digits, t=text)
    if "." in digits or "/" not in digits:
        yield "$5", f"${digits}" if not digits.startswith("-") else rf"\${digits}"
        yield from _filled(templates.PLAIN_UNITS, d=digits)


def _measured_notations(reference: Reference) -> Iterator[tuple[str, str]]:
    found = _MEASURED.fullmatch(reference.text)
    assert found
    unit = (found["unit"] or "").strip()
    parts = {"d": found["number"].strip(), "e": reference.text[len(found["number"]) :].strip(), "u": unit}
    yield from _filled(templates.MEASURED, **parts)
    if "circ" in reference.text:
        yield from _filled(templates.DEGREES, **parts)
    if unit and reference.text.endswith("}"):
        yield from _filled(templates.NAMED_UNIT, **parts)
        if re.fullmatch("[A-Za-z ]+", unit):
            yield from _filled(templates.WORD_UNIT, **parts)


def _letter_notations(reference: Reference) -> Iterator[tuple[str, str]]:
    yield from _filled(templates.LETTER, x=_letter(reference))


def _letter(reference: Reference) -> str:
    return _MARKUP.sub(r"\1", reference.text).strip(" ()")


def _words_notations(reference: Reference) -> Iterator[tuple[str, str]]:
    words = _MARKUP.sub(r"\1", reference.text).strip()
    yield from _filled(templates.WORDS, x=words, c=words[0].upper() + words[1:])


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
    opening, closing = _brackets(reference)
    low, high = reference.parts
    plus = "+" if high == r"\infty" else ""
    yield from _filled(templates.INTERVAL, o=opening, c=closing, l=low, h=high, p=plus)
    yield "∞", f"{opening}{low}, {high}{closing}".replace(r"\infty", "∞")


def _brackets(reference: Reference) -> tuple[str, str]:
    bare = re.sub(r"\\(?:left|right)", "", reference.text).strip()
    return bare[0], bare[-1]


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


def wrong_outputs(reference: Reference, other: Reference | None) -> Iterator[Output]:
    """Wrong responses; `other` is the reference of another question."""
    misses = list(_near_misses(reference))
    if other is not None and _surely_different(reference, other):
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


def _surely_different(reference: Reference, other: Reference) -> bool:
    if reference.value is not None and other.value is not None:
        return other.kind == reference.kind and _differs(reference, other.value)
    if reference.kind == other.kind == "letter":
        return _letter(reference) != _letter(other)
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
        letter = _letter(reference)
        another = "ABCDE"["ABCDE".find(letter) - 1]
        if another != letter:
            yield "another letter", rf"\text{{({another})}}"
            yield "another letter, bare", another
    elif reference.kind == "words":
        said = _MARKUP.sub(r"\1", reference.text).strip().lower()
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
    digits = _digits(reference)
    if not digits:
        return
    longer = digits + "1" if "." in digits or "/" in digits else f"{digits}7"
    if value and _differs(reference, Fraction(longer)):
        yield "one digit more", longer
    nearby = {name: _written(value + step, reference.kind) for name, step in {"b": -2, "a": 2, "c": 3}.items()}
    yield from _filled(templates.WRONG_NUMBER, d=digits, **nearby)
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
    if value and (scaled := _POWER_OF_TEN.fullmatch(reference.text.lstrip("-"))):
        mantissa = value_of(scaled[1])
        assert mantissa is not None
        yield "another mantissa", reference.text.replace(scaled[1], _decimal(mantissa + 1), 1)
        yield "another exponent", re.sub(r"10\s*\^\s*\{?(-?)", r"10^{\g<1>1", reference.text).rstrip("}") + "}"


def _written(value: Fraction, kind: str) -> str:
    if kind in ("decimal", "measured") and (decimal := _decimal(value)):
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
    opening, closing = _brackets(reference)
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
