"""Environments: what a class must have, and what it may answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dagrl
from dagrl.plugins.environment import load_environment

GAMES = """
import dagrl

class Game:
    def __init__(self, size=3):
        self.size = size
    def reset(self, seed, answer):
        self.hidden = answer
    def step(self, response):
        return dagrl.Observation(response + self.hidden, 1.0)

class Nosy:
    def reset(self, **row): ...
    def step(self, response): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_games.py").write_text(GAMES)
    return tmp_path


def test_a_class_takes_of_the_row_what_its_reset_names(folder: Path) -> None:
    found = load_environment("own_games:Game", {"size": 5}, folder)
    assert found.fields == ("answer", "seed")
    game: Any = found()
    assert game.size == 5
    game.reset(seed=1, answer="!")
    assert game.step("so") == dagrl.Observation("so!", 1.0)
    assert load_environment("own_games:Nosy", {}, folder).fields == (
        "prompt",
        "answer",
        "data_source",
        "extra_info",
        "seed",
    )


@pytest.mark.parametrize(
    ("observation", "ends"),
    [
        (dagrl.Observation("go on"), False),
        (dagrl.Observation("that is all", done=True), True),
        (dagrl.Observation(reward=1.0), True),
    ],
)
def test_a_response_ends_where_it_is_done_or_has_nothing_to_say(observation: dagrl.Observation, ends: bool) -> None:
    assert observation.ends == ends


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), True])
def test_a_reward_is_a_finite_number(reward: float) -> None:
    with pytest.raises(ValueError, match="a finite number"):
        dagrl.Observation("text", reward)


def test_a_text_is_a_string() -> None:
    with pytest.raises(TypeError, match="a string or None, not 3"):
        dagrl.Observation(3)  # type: ignore[arg-type]
