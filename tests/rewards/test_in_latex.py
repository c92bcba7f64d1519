"""Answers as LaTeX, and percentages."""

from __future__ import annotations

import pytest

from dagrl.rewards.in_latex import in_latex, of_hundred


@pytest.mark.parametrize(
    ("answer", "latex"),
    [
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"1\,000\,000", "1000000"),
        ("1{,}000", "1000"),
        (r"1\,00", r"1\,00"),
        ("1 000 000.5", "1000000.5"),
        (r"10,\!080", "10080"),
        (r"5\ 220/463", r"5\ 220/463"),
        ("5 220/463", "5 220/463"),
        (r"(1,\ 200)", r"(1,\ 200)"),
        ("1, 200", "1, 200"),
        (r"1,000\pi", r"1000\pi"),
        ("1,000", "1,000"),
        ("-2e-3", r"-2\times 10^{-3}"),
        ("1.5E3", r"1.5\times 10^{3}"),
        ("2e", "2e"),
        ("x1e3", "x1e3"),
        ("2e3x", "2e3x"),
        ("2**10", "2^{10}"),
        ("x**(n-1)", "x^{(n-1)}"),
        ("−5", "-5"),
        ("５٣", "53"),
        ("x²⁻¹ + a₁₀", "x^{2-1} + a_{10}"),
        ("1½", r"1\frac{1}{2}"),
        ("3√2", r"3\sqrt{2}"),
        ("√(x+1)", r"\sqrt{(x+1)}"),
        ("二", "二"),
        (r"x \leqslant 2", r"x \leq  2"),
        (r"\mathrm{e}^2+3\text{i}+{\rm e}", "e^2+3i+e"),
        (r"3\pi\mathrm{i}", r"3\pi i"),
        (r"\mathrm{if}", r"\mathrm{if}"),
        (r"0.\overline{72}", r"\frac{8}{11}"),
        (r"-1.1\overline 6", r"-\frac{7}{6}"),
        (r"0.\dot{1}4285\dot7", r"\frac{1}{7}"),
        (r"0.\bar{9}", "1"),
        (r"1,234.\overline{5}", r"\frac{11111}{9}"),
        (r"0.3\overline{21}_4", r"0.3\overline{21}_4"),
        (r"\overline{72}", r"\overline{72}"),
        ("n!^2", "(n!)^2"),
    ],
)
def test_plain_notation_becomes_latex(answer: str, latex: str) -> None:
    assert in_latex(answer) == latex


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        (r"50\%", "50"),
        ("12.5 % ", "12.5"),
        (r"5\text{ percent}", "5"),
        ("five percent", "five"),
        ("50", None),
        ("%", None),
    ],
)
def test_percentages(answer: str, number: str | None) -> None:
    assert of_hundred(answer) == number


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece", ["1", "1.", "1e", "**", "√(", r"1\,", "%", " ", "²", "½", "(", "\\text{ ", "0.\\dot1", ".", "!"]
)
def test_whatever_a_policy_repeats_takes_no_longer_than_it_is(piece: str) -> None:
    in_latex(piece * 100_000)
    of_hundred(piece * 100_000)
