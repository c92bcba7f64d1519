"""Final answers as texts: the same for the same answer, whatever the writing."""

from __future__ import annotations

import pytest

from dagrl.rewards.final_answer import final_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So it is \boxed{18}.", "18"),
        (r"\boxed{17}, no: \boxed{ 18 }", "18"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}"),
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
    ],
)
def test_answers(response: str, answer: str) -> None:
    assert final_answer(response) == answer


@pytest.mark.parametrize("response", ["", "I do not know.", r"\boxed{}", r"\boxed{ . }"])
def test_no_answer(response: str) -> None:
    assert final_answer(response) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", ["1", "####", "#### 1 ", "1,", "-", r"\boxed{", r"\text{", "{", " \t", "$"])
def test_whatever_a_policy_repeats_takes_no_longer_than_it_is(piece: str) -> None:
    final_answer("#### " + piece * 100_000 + " x")
