"""docs/data.md: its example runs, and its table names every script."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "data.md").read_text()


def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "riddles.py").write_text(example)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"q": "What?", "a": a}) + "\n" for a in ("it", "")))
    command = [sys.executable, "riddles.py", "--local_dir", "out", "--source", "."]
    output = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=300).stdout
    assert output.startswith("out/train.parquet: 1 row; dropped 1: no answer\n")
    (row,) = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert row["prompt"][0]["content"] == "What? Answer in one word."


def test_the_table_names_every_script() -> None:
    scripts = {path.name for path in (ROOT / "data_preprocess").glob("*.py")}
    assert set(re.findall(r"^\| `(\w+\.py)`", TEXT, re.MULTILINE)) == scripts
