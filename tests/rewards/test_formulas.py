"""Formulas: equal by value, whatever the size of the numbers, and by math-verify where values do not decide."""

from __future__ import annotations

import pytest

from dagrl.rewards.formulas import same_formula
from dagrl.rewards.in_latex import in_latex

TINY = [
    (r"\frac{1}{2^{98}}", r"2^{-98}", r"\frac{1}{2^{99}}"),
    (r"e^{-50}", r"\frac{1}{e^{50}}", "e^{-51}"),
    (r"\frac{19!}{38!}", r"\frac{18! \cdot 19}{38!}", r"\frac{20!}{40!}"),
    (r"(\sqrt{2}-1)^{80}", r"\frac{1}{(1+\sqrt{2})^{80}}", r"(\sqrt{2}-1)^{81}"),
    (r"1+2^{-80}", r"\frac{2^{80}+1}{2^{80}}", "1"),
    (r"\sqrt{2}+e^{-60}", r"e^{-60}+\sqrt{2}", r"\sqrt{2}"),
    (r"10^{-30}\pi", r"\frac{\pi}{10^{30}}", "0"),
    (r"x e^{-50}", r"\frac{x}{e^{50}}", "x e^{-51}"),
    (r"x+e^{-50}", r"e^{-50}+x", "x+e^{-51}"),
    (r"e^{-50}x=1", r"x=e^{50}", "e^{-51}x=1"),
    (r"\begin{pmatrix} e^{-50} \\ 1 \end{pmatrix}", r"\begin{bmatrix} \frac{1}{e^{50}} \\ 1 \end{bmatrix}",
     r"\begin{pmatrix} e^{-51} \\ 1 \end{pmatrix}"),
    ("10^{500}", r"10 \cdot 10^{499}", "10^{500}+1"),
    (r"1.5\pi \times 10^{-9}", r"\frac{3\pi}{2} \cdot 10^{-9}", r"\pi \times 10^{-9}"),
]  # fmt: skip


@pytest.mark.parametrize(("formula", "same", "other"), TINY)
def test_small_differences_count(formula: str, same: str, other: str) -> None:
    assert same_formula(formula, same)
    assert not same_formula(formula, other)
    assert not same_formula(other, formula)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (r"\frac{1}{2}", r"\cos\frac{\pi}{7}-\cos\frac{2\pi}{7}+\cos\frac{3\pi}{7}"),
        ("1", r"\sqrt[3]{2+\sqrt{5}}+\sqrt[3]{2-\sqrt{5}}"),
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"),
        (r"\pi", "3.14159265"),
        ("1+2x+x^2", "(x+1)^2"),
        (r"1+\frac{2}{x-1}", r"\frac{x+1}{x-1}"),
        (r"\binom{2n}{n}", r"\frac{(2n)!}{n!^2}"),
        (r"\binom{n}{k}", r"\binom{n}{n-k}"),
        ("|x-5|", "|5-x|"),
        ("55", r"\sum_{k=1}^{10} k"),
        ("-1", r"\mathrm{e}^{\mathrm{i}\pi}"),
        ("e-1", r"-1+\mathrm{e}"),
        (r"3\pi i", r"3\pi\mathrm{i}"),
        ("2i", r"\sqrt{-4}"),
        (r"\frac{\pi}{4}", r"45^\circ"),
        ("45", r"45^\circ"),
        (r"\frac{\pi}{2}-\alpha", r"90^{\circ}-\alpha"),
        (r"\frac{1}{2}", r"\sin 30^\circ"),
        ("6", "2(3)"),
        (r"\frac{14}{3}", r"2\frac{7}{3}"),
        ("2.5", r"2\frac{1}{2}"),
        ("210", r"{7 \choose 3}{4 \choose 2}"),
        (r"1+\frac{R}{r}", r"\frac{R+r}{r}"),
        ("2N", "2n"),
        ("2x-y+3=0", "y=2x+3"),
        ("2x+2=0", "x+1=0"),
        ("x > 3", "2x > 6"),
    ],
)
def test_equal_formulas(reference: str, said: str) -> None:
    assert same_formula(in_latex(reference), in_latex(said))
    assert same_formula(in_latex(said), in_latex(reference))


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("x", "|x|"),
        ("5-x", r"\sqrt{(x-5)^2}"),
        ("x", r"\lfloor x \rfloor"),
        ("x^{2024}", "x^{2025}"),
        ("x^{2024}", "x^{2024}+1"),
        ("x^{2024}", "x^{2024}+10^{-40}"),
        (r"\binom{n}{k}", r"\binom{n}{k}+10^{-40}"),
        (r"\frac{a}{b}", r"\frac{b}{a}"),
        (r"\pi", "3.14"),
        ("5", "2(3)"),
        ("12", r"2\binom{5}{2}"),
        ("1", r"\frac{a}{A}"),
        ("2a", "A+a"),
        (r"\sin 30^\circ", r"\sin 30"),
        ("60\\pi", r"60^\circ"),
        ("180", r"\pi"),
        ("x+1=0", "x+2=0"),
        ("5", r"5\mathrm{i}"),
        ("x", ""),
        ("}", "{"),
    ],
)
def test_different_formulas(reference: str, said: str) -> None:
    assert not same_formula(in_latex(reference), in_latex(said))
    assert not same_formula(in_latex(said), in_latex(reference))
