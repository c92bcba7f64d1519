"""Arguments of LaTeX commands get braces."""

from __future__ import annotations

import pytest

from dagrl.rewards.in_latex import with_braces


@pytest.mark.parametrize(
    ("text", "braced"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        (r"\dfrac ab+\tfrac{1}{2}", r"\frac{a}{b}+\frac{1}{2}"),
        (r"\frac\pi4", r"\frac{\pi}{4}"),
        (r"\frac{\sqrt2}\pi", r"\frac{\sqrt{2}}{\pi}"),
        (r"\sqrt\frac12", r"\sqrt{\frac{1}{2}}"),
        (r"\sqrt[3]2", r"\sqrt[3]{2}"),
        (r"[\sqrt2, 3]", r"[\sqrt{2}, 3]"),
        (r"\sqrt \text{a}", r"\sqrt{\text{a}}"),
        (r"2^\frac12", r"2^{\frac{1}{2}}"),
        (r"x^{23}+y^4", r"x^{23}+y^4"),
        (r"\binom52", r"\binom{5}{2}"),
        (r"\dbinom{n}k", r"\binom{n}{k}"),
        (r"5 \choose 2", r"\binom{5}{2}"),
        (r"2{n+1 \choose {k}}", r"2\binom{n+1}{{k}}"),
        (r"x^{n \choose 2}", r"x^{\binom{n}{2}}"),
        (r"\frac{5 \choose 2}{{10 \choose 2}}", r"\frac{\binom{5}{2}}{\binom{10}{2}}"),
        (r"\{1, 2\}", r"\{1, 2\}"),
    ],
)
def test_arguments_get_braces(text: str, braced: str) -> None:
    assert with_braces(text) == braced
    assert with_braces(braced) == braced


@pytest.mark.parametrize("text", ["", "}{", r"\frac", r"{\frac}", r"\sqrt{", r"2\choose 3\choose 4", r"\sqrt[", "{{}"])
def test_plain_text_stays(text: str) -> None:
    assert with_braces(text) == text


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", [r"\frac", r"\sqrt", r"\sqrt[", "{", "}", r"{\choose", "^", r"\frac{", r"\text"])
def test_whatever_a_policy_repeats_takes_little_time(piece: str) -> None:
    for repeats in (1_000, 9_000 // len(piece), 100_000):
        with_braces(piece * repeats)
