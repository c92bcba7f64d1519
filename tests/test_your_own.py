"""docs/your_own.md: its code is saved as it says, validates, and does what is said about it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from dagrl.algorithms.own_loss import LossTokens
from dagrl.algorithms.rows import RowReducer
from dagrl.config.schema import RolloutNode
from dagrl.plugins.custom import load_function
from dagrl.plugins.tool import load_tool

DOCUMENT = Path(__file__).parents[1] / "docs" / "your_own.md"
BLOCKS = re.findall(r"```(?:yaml|python)\n(?:# (\S+)\n)?(.*?)```", DOCUMENT.read_text(), re.DOTALL)
FILES = {name: text for name, text in BLOCKS if name}
MOST_LINES = 15


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the document's files. Other tests may have modules of the same names."""
    modules = [name.removesuffix(".py") for name in FILES]
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    others = {module: sys.modules.pop(module) for module in modules if module in sys.modules}
    yield tmp_path
    for module in modules:
        sys.modules.pop(module, None)
    sys.modules.update(others)


def validate(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dagrl", "validate", "own.yaml", *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_every_kind_has_a_file_of_its_own() -> None:
    assert set(FILES) == {
        "own.yaml",
        *(f"my_{kind}.py" for kind in ("rewards", "nodes", "estimators", "losses", "tools")),
    }


@pytest.mark.parametrize("name", FILES)
def test_its_files_are_short(name: str) -> None:
    assert len(FILES[name].strip().splitlines()) <= MOST_LINES


def test_its_pipeline_validates(folder: Path) -> None:
    done = validate(folder)
    assert done.returncode == 0, done.stderr
    assert "token_weight = " not in done.stdout
    assert "token_weight" in done.stdout


def test_its_error_is_as_documented(folder: Path) -> None:
    text = FILES["own.yaml"].replace("my_losses:fading", "my_losses:fadign")
    # The document's file begins with a line that says its name.
    (folder / "own.yaml").write_text("# own.yaml\n" + text)
    done = validate(folder)
    (told,) = re.findall(r"\$ dagrl validate own.yaml\n +(.*)\n", DOCUMENT.read_text())
    assert (done.returncode, done.stderr.strip()) == (2, told)


def test_its_reward_scores(folder: Path) -> None:
    close = load_function("my_rewards:close", folder)
    assert [close(said, "7") for said in ("7", "4", "7+", "")] == [1.0, pytest.approx(2 / 3), 0.0, 0.0]
    assert close("1", "7", reach=3) == 0.0


def test_its_node_weighs_early_tokens_more(folder: Path) -> None:
    early_first = load_function("my_nodes:early_first", folder)
    weights = early_first({"response_tokens": [np.array([5, 6, 7]), np.array([], dtype=np.int64)]}, decay=0.5)
    assert [each.tolist() for each in weights["token_weight"]] == [[1, 0.5, 0.25], []]


def test_its_estimator_compares_with_the_median(folder: Path) -> None:
    above_median = load_function("my_estimators:above_median", folder)
    batch = {"reward": np.array([0.0, 1.0, 9.0, 5.0]), "group_id": np.array([3, 3, 3, 8])}
    assert above_median(batch).tolist() == [-1, 0, 2, 0]


def test_its_loss_fades_out(folder: Path) -> None:
    fading = load_function("my_losses:fading", folder)
    # Ratios 1 and e^(1/2), weights 1 and 1/2; a width of 1/2 leaves e^-1 of the second: 2 and -e^(-1/2).
    logprob = torch.tensor([-1.0, -0.5], dtype=torch.float64, requires_grad=True)
    columns = {"old_logprob": [-1.0, -1.0], "advantage": [-2.0, 2.0], "token_weight": [1.0, 0.5]}
    values = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    rows = RowReducer(torch.tensor([0, 0]), torch.tensor([True, True]))
    loss = fading(LossTokens({"logprob": logprob, **values}, rows), width=0.5)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([2.0, -np.exp(-0.5)])
    assert logprob.grad.tolist() == pytest.approx([2.0, -np.exp(-0.5)])


def test_its_tool_can_be_called_and_named(folder: Path) -> None:
    tool = load_tool("my_tools:digit_sum", {}, folder)
    assert tool.call({"number": -472}, {}) == 13
    (unnamed,) = [yaml.safe_load(text) for name, text in BLOCKS if not name]
    rollout = {"op": "rollout", "engine": "generator", "sampling": {"max_new_tokens": 9}, **unnamed["nodes"]["rollout"]}
    assert RolloutNode.model_validate(rollout).multi_turn
