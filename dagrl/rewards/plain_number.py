r"""Parses exact fractions: ``1{,}000``, ``3\frac{1}{2}``, ``3 1/2``, ``1.2\times 10^{3}``, ``50\%``, ``\$5``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from dagrl.rewards.in_latex import of_hundred
from dagrl.rewards.markup import without_unit

_LONGEST = 1000
_LARGEST_EXPONENT = 400
SIX_PLACES = Fraction(5, 10**7)
RELATIVE = Fraction(2, 10**5)

_SPACE = r"(?:\s|~|\\[,;:! ])*"
_CURRENCY = re.compile(r"\\?\$|[€£¥]|\\pounds")
_DEGREES = re.compile(
    rf"{_SPACE}(?:\^\s*(?:\\circ|\{{\s*\\circ\s*\}})|\\degree|\\deg)\s*(?:[CF]|\\(?:text|mathrm)\{{[CF]\}})?\Z"
)
_PARENTHESES = re.compile(rf"(?:\\(?:left|big|Big))?\((?P<inside>[^(),]*?){_SPACE}(?:\\(?:right|big|Big))?\)")
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_EXPONENT = rf"10{_SPACE}\^{_SPACE}(?:\{{\s*[-+]?\d+\s*\}}|[-+]?\d+)"
_SCALED = re.compile(
    rf"(?P<decimal>{_DECIMAL})(?:{_SPACE}(?:\\times|\\cdot|\*){_SPACE}(?P<times>{_EXPONENT}))?|(?P<power>{_EXPONENT})"
)
_TERM = rf"{_SPACE}(?:\{{\s*-?(?:{_DECIMAL})\s*\}}|\d)"
_FRACTION = re.compile(
    rf"(?P<whole>\d+){_SPACE}\\[dtc]?frac(?P<a1>{_TERM})(?P<b1>{_TERM})|\\[dtc]?frac(?P<a2>{_TERM})(?P<b2>{_TERM})"
    rf"|(?:(?P<whole2>\d+)(?:\s|~|\\[,;: ])+)?(?P<a3>\d[\d,]*){_SPACE}/{_SPACE}(?P<b3>\d[\d,]*)"
)


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """A number and its notation."""

    value: Fraction
    """Without percent sign."""
    percent: bool
    rounded: bool
    """Written with a decimal point, so that it may be rounded."""

    def equals(self, other: PlainNumber) -> bool:
        """Whether both are equal: exactly, or to six decimal places if one of them is rounded.

        Numbers below 0.025 must also agree to a relative 2e-5, because six places mean nothing for ``5e-9``. If one is
        a percentage, the other may be the same number without the sign, or a hundredth of it: data sets use both.
        """
        rounded = self.rounded or other.rounded
        if self.percent == other.percent:
            return _equal(self.value, other.value, rounded)
        percent, plain = (self, other) if self.percent else (other, self)
        return any(_equal(value, plain.value, rounded) for value in (percent.value, percent.value / 100))


def _equal(one: Fraction, other: Fraction, rounded: bool) -> bool:
    tolerance = min(SIX_PLACES, RELATIVE * max(abs(one), abs(other))) if rounded else 0
    return abs(one - other) <= tolerance


def plain_number(answer: str) -> PlainNumber | None:
    """The number that an answer in LaTeX represents, ignoring its unit; None for anything else."""
    if len(answer) > _LONGEST:
        return None
    hundredths = of_hundred(answer)
    text, negative = _signed(_DEGREES.sub("", without_unit(answer if hundredths is None else hundredths)))
    match = _SCALED.fullmatch(text)
    value = _scaled(match) if match else None
    fraction = None if match else _FRACTION.fullmatch(text)
    if fraction:
        value = _fraction(fraction)
    if value is None:
        return None
    rounded = "." in text or bool(match and match["times"])
    return PlainNumber(-value if negative else value, hundredths is not None, rounded)


def _signed(text: str) -> tuple[str, bool]:
    """The text without sign, currency and surrounding brackets, and whether it is negative."""
    negative = False
    while True:
        text = text.strip()
        currency = _CURRENCY.match(text)
        around = _PARENTHESES.fullmatch(text)
        if text[:1] in ("-", "+"):
            negative ^= text[0] == "-"
            text = text[1:]
        elif currency:
            text = text[currency.end() :]
        elif around:
            text = around["inside"]
        else:
            return text, negative


def _scaled(match: re.Match[str]) -> Fraction | None:
    power = re.search(r"[-+]?\d+\D*\Z", match["times"] or match["power"] or "0")
    assert power
    exponent = int(re.sub(r"\D*\Z", "", power[0]))
    if abs(exponent) > _LARGEST_EXPONENT:
        return None
    return Fraction((match["decimal"] or "1").replace(",", "")) * Fraction(10) ** exponent


def _fraction(match: re.Match[str]) -> Fraction | None:
    whole = match["whole"] or match["whole2"]
    above, below = (_term(match[f"{side}1"] or match[f"{side}2"] or match[f"{side}3"]) for side in "ab")
    if not below:
        return None
    if whole is None:
        return above / below
    # 2\frac{7}{3} is a product.
    return int(whole) + above / below if 0 < above < below else None


def _term(text: str) -> Fraction:
    return Fraction(re.sub(r"[\s{},~]|\\[,;:! ]", "", text))
