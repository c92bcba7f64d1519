"""Rewards are found by name, or beside the pipeline file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.rewards.registry import load_reward


def test_built_in_rewards_are_found_by_name() -> None:
    assert load_reward("exact")("7", "7") == 1.0
    assert load_reward("math").__name__ == "math_reward"


def test_a_users_reward_is_found_beside_the_pipeline(tmp_path: Path) -> None:
    (tmp_path / "shouting_reward.py").write_text("def loud(response):\n    return float(response.isupper())\n")
    assert load_reward("shouting_reward:loud", tmp_path)("HEY") == 1.0


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (
            "maths",
            "there is no reward 'maths'; built-in rewards are agent, code, environment, exact, math; did you mean "
            "math?",
        ),
        ("bleu", "module:function"),
        ("no_such_module_here:f", "no_such_module_here"),
        ("dagrl.rewards.exact:inexact", "has no function 'inexact'"),
    ],
)
def test_a_reward_that_is_not_there_is_refused(fn: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        load_reward(fn)
