"""Which answers a reward of dagrl can score."""

from __future__ import annotations

import json

import pytest

from dagrl.rewards.scorable import Scorable


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("72", "math"),
        ("Half of 48 is 24.\n#### 1,024", "math"),
        (r"\frac{1}{2}", "math"),
        (r"the answer is \boxed{x+1}", "math"),
        ('["2", "3"]', "math"),
        ("", ""),
        ("no number\n####  ", ""),
        (json.dumps({"inputs": ["1"], "outputs": ["2"]}), "code"),
        (json.dumps(["assert f(1) == 2"]), "code"),
    ],
)
def test_answers_have_the_reward_that_can_score_them(answer: str, reward: str) -> None:
    assert Scorable()(answer) == reward


def test_tests_that_the_code_reward_refuses_are_no_code() -> None:
    assert Scorable()(json.dumps({"inputs": ["1"], "outputs": []})) != "code"


def test_only_some_formulas_are_compared() -> None:
    scorable = Scorable(most_formulas=1)
    assert [scorable(answer) for answer in ("x", "y", "x", "3")] == ["math", "not checked", "math", "math"]
