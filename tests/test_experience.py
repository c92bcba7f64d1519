"""docs/experience.md: its pipeline validates, and its nodes do what is said about them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dagrl.cli import main
from dagrl.plugins.custom import load_function

PAGE = (Path(__file__).parents[1] / "docs" / "experience.md").read_text()
FILES = dict(re.findall(r"```(?:yaml|python)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_its_pipeline_validates_and_changes_columns_in_its_order(folder: Path, capsys) -> None:
    assert main(["validate", str(folder / "experience.yaml")]) == 0
    text = capsys.readouterr().out
    assert "response_mask = whole.trained_mask, advantage = balance.balanced" in text
    assert main(["graph", str(folder / "experience.yaml")]) == 0
    # The judge is not asked about groups that do not pass.
    judge = re.search(r"polite  \(judge on host\)\n((?:    .*\n)+)", capsys.readouterr().out)
    assert judge is not None and "keep -> the selected groups" in judge[1]


def test_its_nodes_join_mask_and_balance(folder: Path) -> None:
    joined, mask_repeated, mask_cut, balance = (
        load_function(f"my_experience:{name}", folder)
        for name in ("joined", "mask_repeated", "mask_cut", "balance_sources")
    )
    assert joined({"right": np.array([0.0, 1.0, 1.0]), "polite": np.array([1.0, 0.0, 1.0])}, weight=0.2)[
        "reward"
    ].tolist() == [0, 1, 1.2]
    responses = [np.array(tokens) for tokens in ([1, 2], [1], [1, 2], [1, 2])]
    masks = [np.ones(len(tokens), np.float32) for tokens in responses]
    batch = {"group_id": np.array([4, 4, 4, 5]), "response_tokens": responses, "response_mask": masks}
    assert [each.tolist() for each in mask_repeated(batch)["response_mask"]] == [[1, 1], [1], [0, 0], [1, 1]]
    reasons = ["stop", "length", "stop", "turns"]
    cut = mask_cut({"finish_reason": reasons, "response_mask": masks})["response_mask"]
    assert [each.tolist() for each in cut] == [[1, 1], [0], [1, 1], [1, 1]]
    sources, advantages = ["a", "b", "a", "a"], [np.full(len(mask), 2.0) for mask in masks]
    balanced = balance({"data_set": sources, "advantage": advantages, "response_mask": masks})["advantage"]
    sums = {name: sum(each.sum() for each, own in zip(balanced, sources, strict=True) if own == name) for name in "ab"}
    assert sums["a"] == pytest.approx(sums["b"]) and sum(sums.values()) == pytest.approx(2 * 7)
