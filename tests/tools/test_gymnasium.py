"""Gymnasium's environments as text: a real game is played to its end."""

from __future__ import annotations

import pytest

from dagrl.plugins.environment import environment_fields
from dagrl.tools.gymnasium import Game

LAKE = {"id": "FrozenLake-v1", "options": {"render_mode": "ansi", "is_slippery": False}}


def test_a_game_is_played_to_its_end() -> None:
    game = Game(**LAKE)
    first = game.reset({"seed": 3})
    assert "S" in first and "G" in first
    seen = game.step("I go right: 2")
    assert (seen.reward, seen.ends) == (0.0, False) and "(Right)" in seen.text
    for move in (2, 1, 1, 1):
        seen = game.step(str(move))
    last = game.step("2")
    assert (last.reward, last.ends) == (1.0, True)
    game.close()


def test_an_invalid_action_is_answered_and_penalised() -> None:
    game = Game(**LAKE, invalid_reward=-0.5)
    game.reset({})
    assert game.step("left, please").reward == -0.5
    assert game.step("left, please").text == "This is no action: answer with a number from 0 to 3"
    assert "9 is not in Discrete(4)" in str(game.step("9").text)


def test_a_seed_begins_the_same_episode() -> None:
    starts = [Game("Blackjack-v1").reset({"seed": seed}) for seed in (1, 1, 2, 3, 4)]
    assert starts[0] == starts[1] and len(set(starts)) > 1


def test_it_fits_the_environments_of_rollouts(tmp_path) -> None:
    assert environment_fields(Game, "dagrl.tools.gymnasium:Game", LAKE) == ("extra_info",)
    with pytest.raises(ValueError, match="environment_args"):
        environment_fields(Game, "dagrl.tools.gymnasium:Game", {})
