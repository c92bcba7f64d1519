"""Equality of answers: what is right in odd writings, and what is a near miss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dagrl.rewards.answer_equality import matches

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So it is \boxed{18}.", "18"),
        ("#### 18", "18"),
        ("She has 18 apples.", "18"),
        ("It costs $18.00", "18"),
        (r"\boxed{0.5}", r"\frac{1}{2}"),
        ("answer: 5/2", "2.5"),
        ("#### 1,234", "1234"),
        (r"$\boxed{x^2+2x+1}$", "(x+1)^2"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{x=5}", "5"),
        (r"first \boxed{17}, no: \boxed{18}", "18"),
        (r"\boxed{\frac{\sqrt{2}}{2}} as I said at 3 o'clock", r"\frac{1}{\sqrt 2}"),
        ("#### 18\n\nQuestion: how many are 3 and 4?", "18"),
        ("#### Step 2: add\nThat makes 18", "18"),
        ("18", "9 + 9 = 18, so\n#### 18"),
        ("18", r"\boxed{18}"),
        (r"\boxed{\frac{2}{3}}", r"\$\dfrac23"),
        ("<answer> 18 </answer>", "18"),
        ("#### **18**", "18"),
        ("#### −18", "-18"),
        (r"\boxed{1\,800}", "1800"),
        (r"\boxed{8.7e8}", r"8.7\times 10^{8}"),
        (r"\boxed{2**10}", "1024"),
        (r"\boxed{x²+√2}", r"x^2+\sqrt{2}"),
        (r"\boxed{½}", "0.5"),
        (r"\boxed{45°}", r"45^\circ"),
        (r"\boxed{\emptyset}", r"\varnothing"),
        (r"\boxed{50\%}", "50"),
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{50}", r"50\%"),
        (r"\boxed{0.5}", r"$50\%$"),
        (r"\boxed{50 percent}", r"50\%"),
        (r"\boxed{2\sqrt{3}\%}", r"2\sqrt{3}"),
        ("It is 50%", r"50\%"),
        ("We have 7. Total:42", "42"),
        ("We have 7. Total is `42`", "42"),
        ('We have 7. Total is "42".', "42"),
        ("We have 7. Total is *42*.", "42"),
        ("We have 7, then → 42", "42"),
        ("先走 5 公里，再走 7 公里，共42公里", "42"),
        ("答案是42", "42"),
        (r"\boxed{5元}", "5"),
        (r"\boxed{３．５}", "3.5"),
        (r"\boxed{－5}", "-5"),
        (r"\boxed{（1，2）}", "(1,2)"),
        (r"<answer>\sqrt{2}</answer>", r"\sqrt{2}"),
        (r"<answer>It is 18 apples</answer>", "18"),
        (r"<think>\boxed{7}, or 3, 5</think><answer>$x^2$</answer>", "x^2"),
        (r"\boxed{7} or rather <answer>18</answer>", "18"),
        (r"\boxed {18}", "18"),
        (r"\fbox{18}", "18"),
        (r"\boxed{18.}", "18"),
        (r"\boxed{**18**}", "18"),
        (r"\boxed{\mathbf{18}}", "18"),
        (r"\boxed{1 000}", "1000"),
        ("\\boxed{1\u00a0000}", "1000"),
        (r"\boxed{5~\mathrm{cm}}", "5"),
        (r"\boxed{5~\mathrm{cm}}", r"5\text{ cm}"),
        (r"\boxed{10\ \mathrm{m}\cdot\mathrm{s}^{-1}}", "10"),
        (r"\boxed{5 dollars}", "5"),
        ("The answer is 5/6.", r"\frac{5}{6}"),
        ("The answer is (3, 5).", "(3,5)"),
        (r"\boxed{3 1/2}", r"\frac{7}{2}"),
        (r"\boxed{x = 3 1/2}", r"\frac{7}{2}"),
        (r"\boxed{(x,y) = (1,2)}", "(1,2)"),
        (r"\boxed{[-2,7]}", r"x \in [-2,7]"),
        (r"\boxed{\left( \tfrac12,\ 3 \right)}", r"(\frac{1}{2}, 3)"),
        (r"\boxed{\{2, 1\}}", "1,2"),
        (r"\boxed{x=3 \text{ or } x=5}", "5, 3"),
        (r"\boxed{1 \pm \sqrt2}", r"1+\sqrt{2}, 1-\sqrt{2}"),
        (r"\boxed{(-∞, 2]}", r"(-\infty,2]"),
        (r"\boxed{odd}", r"\text{odd}"),
        (r"\boxed{\mathrm{Odd}}", r"\text{odd}"),
        (r"\boxed{1,000\pi}", r"1000\pi"),
        (r"\boxed{43_{5}}", "43_5."),
        (r"\boxed{90^\circ, 60^\circ}", r"$90^{\circ}$,$60^{\circ}$"),
        (r"\boxed{221,8}", "$221,$8$"),
        (r"\boxed{K=8}", "8"),
        (r"\boxed{8}", "K=8"),
        (r"\boxed{2x=y}", "y=2x"),
        (r"\boxed{\text{5 cm}}", "5"),
        (r"\boxed{5 \text{ cm}, 6 \text{ cm}}", "5, 6"),
        (r"\boxed{18} so it is \boxed{}", "18"),
        (r"\boxed{18} so it is \boxed{", "18"),
        (r"\boxed{AB}", r"\overline{AB}"),
        (r"\boxed{ba}", "ab"),
        (r"\boxed{2, 1}", '["1", "2"]'),
        (r"\boxed{x=1 \text{ or } x=2}", "['1', '2']"),
        (r"\boxed{\frac{1}{2}}", r"['$\\frac{1}{2}$\n']"),
        (r"\boxed{0.5}", '["0.5", "1/2"]'),
        (r"\boxed{1, 2}", "[1, 2]"),
        (r"\boxed{\frac{-1 \pm \sqrt{5}}{2}}", r"\frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}"),
        (r"\boxed{(2, \pm 3)}", "(2, 3), (2, -3)"),
        (r"\boxed{2 - i, 2 + i}", r"2 \mp i"),
        (r"\boxed{0.\overline{72}}", r"\frac{8}{11}"),
        (r"\boxed{66.\overline{6}\%}", r"\frac{200}{3}\%"),
        (r"\boxed{(0.\overline{3}, 1)}", r"\left(\frac13, 1\right)"),
        (r"\boxed{10}", r"{5 \choose 2}"),
        (r"\boxed{3 < x}", r"x \in (3, \infty)"),
        (r"\boxed{(3, \infty)}", "x > 3"),
        (r"\boxed{x \le -1 \text{ or } x \ge 2}", r"(-\infty,-1]\cup[2,\infty)"),
        (r"\boxed{x \in \{1,2\}}", "1, 2"),
        (r"\boxed{\{x \mid 1 < x \leqslant 2\}}", "(1, 2]"),
        (r"\boxed{2x > 6}", r"(3, \infty)"),
        (r"\boxed{|a| \le 1}", r"-1 \le a \le 1"),
        (r"\boxed{\langle 1,2 \rangle}", r"\langle 1, 2\rangle"),
        (r"\boxed{\begin{bmatrix} 1 \\ 2 \end{bmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ],
)
def test_right_answers(response: str, answer: str) -> None:
    assert matches(response, answer)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("We have 7. Total:42", "7"),
        ("We have 7. Total is `42`", "7"),
        (r"\boxed{5万}", "5"),
        (r"\boxed{3和5}", "5"),
        (r"\boxed{17}", "18"),
        (r"18, so \boxed{17}", "18"),
        (r"first \boxed{18}, no: \boxed{17}", "18"),
        ("18\n#### 17", "18"),
        ("18, and then 19", "18"),
        ("", "18"),
        ("####", "18"),
        (r"\boxed{}", "18"),
        (r"\boxed{.}", "18"),
        ("I do not know.", "18"),
        ("lorem ipsum $ dolor ### sit } amet {", "18"),
        (r"\boxed{(2,1)}", "(1,2)"),
        # Both are empty as intervals.
        (r"\boxed{(3,2)}", "(2,1)"),
        (r"\boxed{x+1}", "x+2"),
        (r"\boxed{1\,000}", "0"),
        (r"\boxed{0.5\%}", r"50\%"),
        (r"\boxed{5}", r"50\%"),
        (r"\boxed{\%}", "5"),
        ("<answer></answer>", "18"),
        (rf"\boxed{{{'1,' * 600}1}}", "1"),
        ("<answer>3, 5</answer>", "5"),
        ("<answer>(3, 5)</answer>", "5"),
        (r"<answer>3 \text{ or } 5</answer>", "5"),
        (r"<answer>5\pi</answer>", "5"),
        (r"<answer>\sqrt{2}</answer>", "2"),
        (r"<think>\boxed{18}</think><answer>17</answer>", "18"),
        (r"\boxed{18} or rather <answer>17</answer>", "18"),
        (r"\boxed{31/2}", r"3\frac{1}{2}"),
        (r"\boxed{3/2}", r"3\frac{1}{2}"),
        (r"\boxed{[1,2)}", "[1,2]"),
        (r"\boxed{\{1,2\}}", "1,2,3"),
        (r"\boxed{1,2,2}", "1,2,3"),
        (r"\boxed{(1,\ 200)}", "(1200)"),
        (r"\boxed{1234}", "(1,234)"),
        (r"\boxed{5 \text{ or more}}", "5"),
        (r"\boxed{x=3, y=4}", "(4,3)"),
        (r"\boxed{y=5}", "x=5"),
        (r"\boxed{43_6}", "43_5"),
        (r"\boxed{6}", "6t"),
        (r"\boxed{3+2}", r"3+2\mathrm{i}"),
        (r"\boxed{6.6\times 10^{-34}}", r"5.3\times 10^{-29}"),
        (r"\boxed{0.0000001}", "0.0000002"),
        (r"\boxed{god}", r"\text{dog}"),
        (r"\boxed{N=n+1}", "N=n"),
        (r"\boxed{\text{not odd}}", r"\text{odd}"),
        ("The answer is 5.7x", "5"),
        (r"\boxed{BA}", "AB"),
        (r"\boxed{\text{ACD}}", "DCA"),
        (r"\boxed{1}", '["1", "2"]'),
        (r"\boxed{(1,2)}", "[1, 2]"),
        (r"\boxed{\pm 3}", "3"),
        (r"\boxed{1 \pm \sqrt{2}}", r"1 \pm \sqrt{3}"),
        (r"\boxed{1,2}", "1<x<2"),
        (r"\boxed{y > 3}", "x > 3"),
        (r"\boxed{0.3\overline{21}_4}", r"0.3\overline{21}_5"),
        (r"$\frac{1}{2^{98}}$", r"\frac{1}{2^{99}}"),
    ],
)
def test_wrong_answers(response: str, answer: str) -> None:
    assert not matches(response, answer)


@pytest.mark.parametrize(
    ("response", "answer", "strict"),
    [
        ("#### (16-3-4)*2", "18", False),
        ("The answer is: 12 * 9 + 40", "148", False),
        ("That is 84 - 58", "26", False),
        (r"\boxed{9+9}", "18", False),
        ("#### 36/2", "18", False),
        (r"\boxed{\frac{36}{2}}", "18", False),
        (r"\boxed{2 \times 9}", "18", False),
        (r"\boxed{\binom{4}{2}}", "6", False),
        (r"\boxed{\sqrt{324}}", "18", False),
        ("The answer is 18", "18", False),
        ("18", "18", False),
        ("#### 18", "18", True),
        ("#### $18.00", "18", True),
        ("#### 18 dollars", "18", True),
        ("#### 1,234", "1234", True),
        (r"<answer>18</answer>", "18", True),
        (r"\boxed{x = 18\text{ cm}}", "18", True),
        (r"\boxed{\frac{1}{2}}", "0.5", True),
    ],
)
def test_a_strict_answer_is_computed(response: str, answer: str, strict: bool) -> None:
    assert matches(response, answer)
    assert matches(response, answer, strict=True) is strict


@pytest.mark.parametrize(
    ("response", "counts"),
    [("#### 18", False), ("#### 18\nQuestion: Why", True), (r"\boxed{18}", True), (r"\boxed{18", False)],
)
def test_a_strict_answer_is_not_cut(response: str, counts: bool) -> None:
    assert matches(response, "18", strict=True, cut=True) is counts


def test_a_strict_reference_is_a_number() -> None:
    with pytest.raises(ValueError, match="'x\\+1' is no number; remove `strict`"):
        matches(r"\boxed{x+1}", "x+1", strict=True)


@pytest.mark.parametrize("answer", ["", "  ", "####", r"\boxed{}", r"$\boxed{ }$."])
def test_a_reference_without_an_answer_is_refused(answer: str) -> None:
    with pytest.raises(ValueError, match="contains nothing to compare with"):
        matches("18", answer)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the data set's original files are not here")
def test_references_of_gsm8k_are_confirmed() -> None:
    rows = [json.loads(line) for line in (GSM8K / "test.jsonl").read_text().splitlines()[::3]]
    golds = [row["answer"].rpartition("####")[2].strip() for row in rows]
    assert all(matches(row["answer"], gold) for row, gold in zip(rows, golds, strict=True))
    assert all(matches(f"The answer is \\boxed{{{gold}}}", gold) for gold in golds)
    assert not any(matches(f"The answer is \\boxed{{{gold}1}}", gold) for gold in golds)
