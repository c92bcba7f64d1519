"""word_problems.py: right solutions, disjoint splits, the same files for the same seed."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

_CALCULATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
_RESULT: dict[str, Callable[[int, int], float]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left / right,
}


@pytest.fixture
def word_problems(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("word_problems")


def rows(folder: Path, split: str) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = pq.read_table(folder / f"{split}.parquet").to_pylist()
    return read


def test_each_calculation_of_a_solution_is_right_and_the_last_one_is_the_answer(
    word_problems: ModuleType, tmp_path: Path
) -> None:
    word_problems.main(["--local_dir", str(tmp_path), "--train", "2000", "--test", "400"])
    for row in rows(tmp_path, "train") + rows(tmp_path, "test"):
        solution, answer = row["extra_info"]["answer"], row["reward_model"]["ground_truth"]
        calculations = _CALCULATION.findall(solution)
        assert len(calculations) == row["extra_info"]["steps"]
        for left, sign, right, result in calculations:
            assert _RESULT[sign](int(left), int(right)) == int(result)
        totals = [calculation[3] for calculation in calculations]
        # A later step starts from the total before it.
        assert all(total in calculation for total, calculation in zip(totals, calculations[1:], strict=False))
        assert totals[-1] == answer
        assert solution.endswith(f"#### {answer}")


def test_splits_share_no_text_and_lengths_are_equally_frequent(word_problems: ModuleType, tmp_path: Path) -> None:
    word_problems.main(["--local_dir", str(tmp_path), "--train", "2000", "--test", "400"])
    train, test = rows(tmp_path, "train"), rows(tmp_path, "test")
    texts = [row["prompt"][0]["content"] for row in train + test]
    assert len(set(texts)) == 2400
    assert Counter(row["extra_info"]["steps"] for row in test) == {1: 100, 2: 100, 3: 100, 4: 100}
    assert {row["data_source"] for row in train} == {f"dagrl/word_problems_{steps}" for steps in (1, 2, 3, 4)}


def test_the_seed_decides_and_steps_limit_the_lengths(word_problems: ModuleType, tmp_path: Path) -> None:
    small = ["--train", "40", "--test", "10", "--steps", "2"]
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        word_problems.main(["--local_dir", str(tmp_path / name), "--seed", seed, *small])
    first, same, other = (rows(tmp_path / name, "train") for name in "abc")
    assert first == same != other
    assert {row["extra_info"]["steps"] for row in first} == {2}


@pytest.mark.parametrize("options", [["--train", "0"], ["--test", "1e9"], ["--steps", "5"]])
def test_options_outside_their_range_are_refused(word_problems: ModuleType, tmp_path: Path, options: list[str]) -> None:
    with pytest.raises(SystemExit):
        word_problems.main(["--local_dir", str(tmp_path), *options])
    assert list(tmp_path.iterdir()) == []
