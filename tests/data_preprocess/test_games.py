"""Starts of episodes, as a rollout will see them again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

from dagrl.tools.gymnasium import Game


@pytest.fixture
def games(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("games")


def test_a_row_begins_as_its_seed_does(games: ModuleType, tmp_path: Path) -> None:
    games.main(
        ["--game", "Blackjack-v1", "--local_dir", str(tmp_path), "--train", "3", "--test", "2", "--rules", "Hit: 1."]
    )
    rows = pq.read_table(tmp_path / "test.parquet").to_pylist()
    assert [row["extra_info"]["seed"] for row in rows] == [3, 4]
    for row in rows:
        assert row["prompt"][0]["content"] == "Hit: 1.\n\n" + Game("Blackjack-v1").reset(row["extra_info"])


def test_an_unknown_game_is_named(games: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"games\.py: there is no game Nothing-v1"):
        games.main(["--game", "Nothing-v1", "--local_dir", str(tmp_path)])
