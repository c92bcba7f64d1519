"""What surrounds an answer is removed, and nothing else."""

from __future__ import annotations

import pytest

from dagrl.rewards.markup import unwrapped, without_unit


@pytest.mark.parametrize(
    ("answer", "alone"),
    [
        (r"**$\boxed{5}$.**", "5"),
        (r" \, \displaystyle 5\; ", "5"),
        (r"\[ \fbox {x} \]", "x"),
        (r"\boxed{\boxed{\mathbf{5}}}", "5"),
        (r"\text{5}", "5"),
        (r"\text{odd}", r"\text{odd}"),
        (r"\text{a}+\text{b}", r"\text{a}+\text{b}"),
        ("The final answer is $5$.", "5"),
        ("It is 18 apples", "18 apples"),
        ("$a$, $b$", "a, b"),
        (r"\$5", r"\$5"),
        (r"\left\{ 7 \right.", r"\left\{ 7 \right."),
        (r"\{1, 2\}", r"\{1, 2\}"),
        (r"\boxed{}", ""),
        ("", ""),
    ],
)
def test_an_answer_is_unwrapped(answer: str, alone: str) -> None:
    assert unwrapped(answer) == alone


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        (r"5~\mathrm{cm}^2", "5"),
        (r"5\ \text{m}/\text{s}^{2}", "5"),
        (r"864 \mbox{ inches}^2", "864"),
        ("5 apples", "5"),
        ("5 m/s", "5"),
        (r"2\sqrt{3} cm", r"2\sqrt{3}"),
        ("5 pi", "5 pi"),
        ("5 x", "5 x"),
        ("3 or more", "3 or more"),
        (r"3 \text{ or }", r"3 \text{ or }"),
        (r"2\mathrm{i}", r"2\mathrm{i}"),
        (r"\text{cm}", r"\text{cm}"),
    ],
)
def test_units(answer: str, number: str) -> None:
    assert without_unit(answer) == number
