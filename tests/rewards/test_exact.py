"""Text equality, and its two options."""

from __future__ import annotations

import pytest

from dagrl.rewards.exact import exact_reward


@pytest.mark.parametrize(
    ("response", "answer", "options", "reward"),
    [
        ("7", "7", {}, 1.0),
        (" 7\n", "7 ", {}, 1.0),
        ("7.", "7", {}, 0.0),
        ("", "7", {}, 0.0),
        ("77", "7", {}, 0.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "paris", {"ignore_case": True}, 1.0),
        ("a=3, then a=7", "7", {"extract": r"a=(\d+)"}, 1.0),
        ("a=7, then a=3", "7", {"extract": r"a=(\d+)"}, 0.0),
        ("3 and 7", "7", {"extract": r"\d"}, 1.0),
        ("nothing", "nothing", {"extract": r"\d"}, 0.0),
    ],
)
def test_reward(response: str, answer: str, options: dict, reward: float) -> None:
    assert exact_reward(response, answer, **options) == reward


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="extract is not a regular expression"):
        exact_reward("7", "7", extract="(")
