"""Starts of a Gymnasium game as prompts: python data_preprocess/games.py --game FrozenLake-v1 --local_dir data/lake.

Each row has the seed of an episode in `extra_info`, and its first observation in the prompt, for a rollout with
`environment: "dagrl.tools.gymnasium:Game"` and the same options.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from dagrl.data.prepare.command import exit_on_errors
from dagrl.data.prompt_file import PromptRow, write_prompts
from dagrl.tools.gymnasium import Game

EXTRA_INFO = {"split": pa.string(), "seed": pa.int64()}


def prompts(game: str, options: dict[str, Any], rules: str, seeds: range, split: str) -> Iterator[PromptRow]:
    """The starts of episodes with these seeds. Raises ValueError if there is no such game."""
    from gymnasium.error import Error

    try:
        played = Game(game, options=options)
    except Error as error:
        raise ValueError(f"there is no game {game}: {error}") from error
    for seed in seeds:
        first = played.reset({"seed": seed})
        yield PromptRow(f"gymnasium/{game}", f"{rules}\n\n{first}".strip(), "", {"split": split, "seed": seed})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--local_dir", type=Path, required=True, help="folder to write train.parquet and test.parquet to"
    )
    parser.add_argument("--game", required=True, help="id of the environment, such as FrozenLake-v1")
    parser.add_argument("--options", type=json.loads, default={}, help="options of gymnasium.make, as JSON")
    parser.add_argument("--rules", default="", help="text before the first observation")
    parser.add_argument("--train", type=int, default=1024, help="rows of train.parquet; default: %(default)s")
    parser.add_argument("--test", type=int, default=64, help="rows of test.parquet; default: %(default)s")
    given = parser.parse_args(arguments)
    with exit_on_errors(__file__):
        for split, seeds in (("train", range(given.train)), ("test", range(given.train, given.train + given.test))):
            path = given.local_dir / f"{split}.parquet"
            rows = prompts(given.game, given.options, given.rules, seeds, split)
            print(f"{path}: {write_prompts(path, rows, EXTRA_INFO)} rows")


if __name__ == "__main__":
    main()
