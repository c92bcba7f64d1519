"""Final answers as texts: the same for the same answer, whatever the writing."""

from __future__ import annotations

import pytest

from dagrl.rewards.final_answer import final_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So it is \boxed{18}.", "18"),
        (r"\boxed{17}, no: \boxed{ 18 }", "18"),
        (r"\boxed{\frac{1}{2}}", "1/2"),
        (r"\boxed{\dfrac{1}{2}}", "1/2"),
        (r"\boxed{\text{(B)}}", "(B)"),
        (r"\boxed{1{,}000}", "1000"),
        (r"\boxed{−5}", "-5"),
        ("<answer>18</answer>, not <answer>17", "18"),
        ("<answer> </answer> 18", "18"),
        ("17 apples</answer> or 18", "18"),
        ("#### **18**", "18"),
        (r"\boxed{\left(2, 1\right)}", "(2,1)"),
        (r"\boxed{50\%}", "50%"),
        (r"\boxed{\leftarrow}", r"\leftarrow"),
        (r"\boxed{\left\{ 7 \right.}", r"\{7"),
        ("3 + 4 = 7, so\n#### 1,234", "1234"),
        ("#### 18.00", "18"),
        ("#### $18", "18"),
        ("so #### 18 \r\n#### Step 2: add", "18"),
        ("She has 18 apples.", "18"),
        ("between 3 and -4", "-4"),
        ("7-4", "4"),
        ("1,234,567 in all", "1234567"),
        ("about 5/2.", "5/2"),
        (r"no end: \boxed{7", "7"),
        (r"\boxed {18} or \fbox{17}", "17"),
        (r"$\boxed 12$", "12"),
        (r"\boxed{17}, no: <answer>18</answer>", "18"),
        (r"<answer>17</answer>, no: \boxed{18}", "18"),
        (r"<answer>\boxed{18}</answer>", "18"),
        (r"<think>\boxed{7}</think> The answer is 18.", "18"),
        (r"<think>So \boxed{18}</think> That is it.", "18"),
        ("The answer is 5/6. There are 7.", "5/6"),
        (r"the final answer is: $\frac{1}{2}$. I hope it is correct.", "1/2"),
        ("**Final Answer:** **18**", "18"),
        ("The answer is $18, as $7 are left.", "18"),
        (r"The answer is \$18.50.", "37/2"),
        ("The answer is $3$ and $5$.", "3and5"),
        ("The answer is (3, 5).", "(3,5)"),
        ("The answer is 3 1/2 cups.", "7/2"),
        ("The answer is (B).", "(B)"),
        ("Answer: 18, because 3 + 4 is 7", "18"),
        ("The answer is 5 apples + 3 apples = 8 apples", "8"),
        ("What is the answer? First, 3 + 4 is 7", "7"),
        (r"So \boxed{18}. The final answer is \boxed{}", "18"),
        (r"So \boxed{18}. The final answer is \boxed{", "18"),
        (r"So \boxed{18}. The answer is in \boxed{\text{ }}, \fbox{...}", "18"),
        (r"So \boxed{18}. The final answer is \boxed{1", "18"),
        (r"\boxed{\frac{1}{\boxed{}}}", r"\frac{1}{\boxed{}}"),
        ("#### 18 dollars", "18"),
        ("#### 18\n#### 2 Notes", "18"),
    ],
)
def test_answers(response: str, answer: str) -> None:
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    "alike",
    [
        ["1/2", r"\frac12", r"\frac{1}{2}", r"\dfrac{1}{2}", "0.5", "x=0.5", r"\tfrac 12 \text{ cm}"],
        ["5", "x=5", "x = 5.0", "5 cm", "f(x)=5"],
        [r"\frac{\sqrt{2}}{2}", r"\frac{\sqrt2}2", r"\dfrac{\sqrt 2}{2}", r"y = \frac{\sqrt{2}}{2}"],
        ["x^2", "x^{2}", "f(x) = x^2"],
        [r"\binom52", r"{5 \choose 2}"],
        [r"\frac{8}{11}", r"0.\overline{72}"],
        ["e-1", r"\mathrm{e}-1"],
    ],
)
def test_answers_that_differ_in_notation_count_as_one(alike: list[str]) -> None:
    assert len({final_answer(rf"\boxed{{{answer}}}") for answer in alike}) == 1


@pytest.mark.parametrize("pair", [("50", r"50\%"), ("5", "-5"), ("x^2", "x^3"), ("1/2", "2/1"), ("(1,2)", "(2,1)")])
def test_different_answers_count_as_two(pair: tuple[str, str]) -> None:
    assert len({final_answer(rf"\boxed{{{answer}}}") for answer in pair}) == 2


def test_a_strict_answer_is_a_marked_number() -> None:
    responses = [r"\boxed{18}", "#### 18", "<answer>18</answer>", "The answer is 18", "18", r"\boxed{x}"]
    assert [final_answer(each, strict=True) for each in responses] == ["18", "18", "18", None, None, None]


@pytest.mark.parametrize("response", ["", "I do not know.", r"\boxed{}", r"\boxed{ . }"])
def test_no_answer(response: str) -> None:
    assert final_answer(response) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece",
    [
        "1",
        "####",
        "#### 1 ",
        "1,",
        "-",
        r"\boxed{",
        "answer is ",
        "answer is $",
        "<answer>",
        "</think>",
        r"\text{",
        "{",
        " \t",
        "$",
    ],
)
def test_whatever_a_policy_repeats_takes_no_longer_than_it_is(piece: str) -> None:
    for begin in ("#### ", "The answer is $5$", "The answer is ", r"\boxed"):
        final_answer(begin + piece * 100_000 + " x")
