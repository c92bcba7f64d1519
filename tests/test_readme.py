"""What the README shows is a pipeline that validates and a reward that scores."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(yaml|python)\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)


@pytest.fixture
def first_steps(tmp_path: Path) -> Path:
    """A folder with the README's code in files, as a newcomer would save it."""
    names = iter(["first.yaml", "laptop.yaml", "split.yaml", "my_rewards.py", "boxed.yaml"])
    for (_, text), name in zip(BLOCKS, names, strict=True):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", ["first.yaml", "laptop.yaml", "split.yaml", "boxed.yaml"])
def test_its_pipelines_validate(first_steps: Path, name: str) -> None:
    command = [sys.executable, "-m", "dagrl", "validate", name]
    done = subprocess.run(command, cwd=first_steps, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_its_reward_is_short_and_scores(first_steps: Path) -> None:
    text = (first_steps / "my_rewards.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= 10
    scope: dict = {}
    exec(compile(text, "my_rewards.py", "exec"), scope)
    assert scope["boxed"]("3 [4] [7]", "7") == 1.0
    assert scope["boxed"]("7", "7", wrong=-0.1) == -0.1
