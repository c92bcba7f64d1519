"""arithmetic.py: right sums, every pair once, the same files for the same seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest


@pytest.fixture
def arithmetic(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("arithmetic")


def questions(folder: Path, split: str) -> dict[str, str]:
    rows = pq.read_table(folder / f"{split}.parquet").to_pylist()
    return {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in rows}


def test_every_sum_is_right_and_in_one_file(arithmetic: ModuleType, tmp_path: Path) -> None:
    arithmetic.main(["--local_dir", str(tmp_path), "--largest", "12", "--held_out", "0.25"])
    train, test = questions(tmp_path, "train"), questions(tmp_path, "test")
    assert (len(train), len(test)) == (127, 42)
    expected = {f"{left}+{right}=": str(left + right) for left in range(13) for right in range(13)}
    assert train | test == expected
    assert list(train | test) != list(expected)
    further = pq.read_table(tmp_path / "test.parquet")["extra_info"].to_pylist()
    assert all(int(each["wrong"]) == each["left"] + each["right"] + 1 for each in further)
    assert {each["hinted"] for each in further} == {f"{result}={prompt}" for prompt, result in test.items()}


def test_with_nothing_held_out_both_files_hold_all_pairs(arithmetic: ModuleType, tmp_path: Path) -> None:
    arithmetic.main(["--local_dir", str(tmp_path), "--largest", "4", "--held_out", "0"])
    assert questions(tmp_path, "train") == questions(tmp_path, "test")
    assert len(questions(tmp_path, "train")) == 25


def test_the_seed_decides(arithmetic: ModuleType, tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        arithmetic.main(["--local_dir", str(tmp_path / name), "--seed", seed])
    first, same, other = (list(questions(tmp_path / name, "train")) for name in "abc")
    assert first == same != other


@pytest.mark.parametrize(
    "options", [["--held_out", "1"], ["--held_out", "0.001"], ["--largest", "0"], ["--largest", "-5"]]
)
def test_options_that_leave_a_file_empty_are_refused(
    arithmetic: ModuleType, tmp_path: Path, options: list[str]
) -> None:
    with pytest.raises(SystemExit, match=r"arithmetic\.py: .* empty; raise --largest"):
        arithmetic.main(["--local_dir", str(tmp_path), *options])
    assert list(tmp_path.iterdir()) == []
