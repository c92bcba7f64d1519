"""Inequalities as intervals."""

from __future__ import annotations

import pytest

from dagrl.rewards.answer_equality import region


@pytest.mark.parametrize(
    ("answer", "variable", "values"),
    [
        ("x > 3", "x", r"(3,\infty)"),
        (r"3 \ge x", "x", r"(-\infty,3]"),
        (r"1 < x \le 2", "x", "(1,2]"),
        (r"2\sqrt{2} > k_1 \geq -\frac{1}{2}", "k_1", r"[-\frac{1}{2},2\sqrt{2})"),
        (r"x \ne 2", "x", r"(-\infty,2)\cup (2,\infty)"),
        (r"x < 1 \text{ or } x = 5", "x", r"(-\infty,1)\cup \{5\}"),
        (r"x > 1 \text{ and } x < 2", "x", "(1,2)"),
        (r"x \lt 2 \land x \gt 1", "x", "(1,2)"),
        (r"\lambda \in [0, 1]", r"\lambda", "[0, 1]"),
        (r"\{ x \in \mathbb{R} \mid x > 3 \}", "x", r"(3,\infty)"),
        (r"\{x : x \le 3\}", "x", r"(-\infty,3]"),
    ],
)
def test_a_region_is_a_union_of_sets(answer: str, variable: str, values: str) -> None:
    found = region(answer)
    assert found is not None
    assert (found.variable, str(found)) == (variable, values)


@pytest.mark.parametrize(
    "answer",
    ["", "3", "(1,2)", "x=5", "x = 3 or x = 5", "a > b", "x + y < 3", "2x > 6", "x > x^2", "x > 1, y > 2", "x < y < z",
     "1 < x > 2", "x > ", r"x \ne \pm 1", "x < 1 and y > 2", r"x < 1 \text{ and } x < 2", "|x| < 2", r"\{1, 2\}"],
)  # fmt: skip
def test_anything_else_is_none(answer: str) -> None:
    assert region(answer) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", ["<", "x<", r"\{x|", " or ", r"\in", "x \\in ", r"\lambda", "x_", "{", "and "])
def test_whatever_a_policy_repeats_takes_no_longer_than_it_is(piece: str) -> None:
    region("x < " + piece * 100_000)
