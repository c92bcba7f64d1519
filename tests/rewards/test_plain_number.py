"""Numbers out of LaTeX, exactly."""

from __future__ import annotations

from fractions import Fraction

import pytest

from dagrl.rewards.plain_number import plain_number


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("5", 5),
        ("-5", -5),
        ("+ 5", 5),
        ("5.", 5),
        (".5", Fraction(1, 2)),
        ("1,234.5", Fraction(2469, 2)),
        (r"-\$5.50", Fraction(-11, 2)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\frac34", Fraction(-3, 4)),
        (r"\frac{-3}{ 4 }", Fraction(-3, 4)),
        (r"-\left(\dfrac{3}{4}\right)", Fraction(-3, 4)),
        ("7 / 24", Fraction(7, 24)),
        ("3 1/2", Fraction(7, 2)),
        (r"-3\,\tfrac12", Fraction(-7, 2)),
        (r"1.2 \times 10^{-3}", Fraction(12, 10000)),
        (r"2\cdot 10^4", 20000),
        (r"10^{3}", 1000),
        (r"60^{\circ}", 60),
        (r"5~\mathrm{cm}^2", 5),
        ("5 square feet", 5),
        (r"50\%", 50),
    ],
)
def test_numbers(answer: str, value: Fraction) -> None:
    number = plain_number(answer)
    assert number is not None
    assert number.value == value


@pytest.mark.parametrize(
    "answer",
    ["", "x", "5x", "1,2", "(1,2)", r"2\pi", "2^10", r"\sqrt{2}", "1/0", r"2\frac{7}{3}", "3/4/5", "1.2.3", "5 pi",
     r"10^{99999999}", "5_6", "3 4", "1 000/3", "9" * 2000],
)  # fmt: skip
def test_anything_else_is_no_number(answer: str) -> None:
    assert plain_number(answer) is None


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("0.333333", "1/3", True),
        ("0.3333", "1/3", False),
        ("0.0000672", "6.72e-5".replace("e", r"\times 10^{") + "}", True),
        ("0.0000672", "0.0000673", False),
        (r"2.7778 \times 10^{-6}", "0.0000027779", False),
        ("0.016667", "1/60", True),
        ("1000000", "1000001", False),
        (r"50\%", "0.5", True),
        (r"50\%", "50", True),
        (r"50\%", "5", False),
        (r"50\%", r"0.5\%", False),
    ],
)
def test_equality(one: str, other: str, equal: bool) -> None:
    numbers = plain_number(one), plain_number(other)
    assert numbers[0] is not None
    assert numbers[1] is not None
    assert numbers[0].equals(numbers[1]) is equal
    assert numbers[1].equals(numbers[0]) is equal
