"""gsm8k.py: what it makes of the authors' files, and what it says about bad ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import datasets
import pyarrow.parquet as pq
import pytest

from dagrl.config.schema import TokenizerSpec
from dagrl.data.prompts import PromptLoader
from dagrl.model_files.tokenizer import make_tokenizer

ROOT = Path(__file__).parents[2]
ORIGINALS = ROOT.parent / "shared/data/gsm8k"

LINES = [
    {"question": "What are 600 and 634?", "answer": "600+634=1,234.\n#### 1,234"},
    {"question": "Nothing?", "answer": "It has no end"},
    {"question": " ", "answer": "#### 5"},
    {"question": "Und 1½ + 1½?", "answer": "#### 3"},
]


@pytest.fixture
def gsm8k(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("gsm8k")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "originals"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(json.dumps(line) for line in LINES) + "\n\n")
    (folder / "test.jsonl").write_text(json.dumps(LINES[0]) + "\n")
    return folder


def test_lines_become_prompts(gsm8k: ModuleType, source: Path, tmp_path: Path, capsys) -> None:
    gsm8k.main(["--local_dir", str(tmp_path / "out"), "--source", str(source), "--instruction", "Show your work."])
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert rows[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What are 600 and 634? Show your work."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1234"},
        "extra_info": {"split": "train", "index": 0, "question": LINES[0]["question"], "answer": LINES[0]["answer"]},
    }
    assert [(row["extra_info"]["index"], row["reward_model"]["ground_truth"]) for row in rows] == [
        (0, "1234"),
        (3, "3"),
    ]
    assert pq.read_table(tmp_path / "out" / "test.parquet")["extra_info"][0].as_py()["split"] == "test"
    train, test = (line for line in capsys.readouterr().out.splitlines() if not line.startswith(" "))
    assert train.endswith('train.parquet: 2 rows; dropped 1: no final answer after "####"; dropped 1: no question')
    assert test.endswith("test.parquet: 1 row")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{bad", r"train\.jsonl:5: not a line of JSON: .* at column 2"),
        ("\\xff", r"train\.jsonl:5: not a line of JSON"),
        ('{"question": "q"}', r"train\.jsonl:5: no field 'answer'; a row of gsm8k has the fields question, answer"),
        ('{"question": 7, "answer": "#### 7"}', r"train\.jsonl:5: 'question' is a whole number, not text"),
        ("[1]", r"train\.jsonl:5: not an object with fields, but \[1\]"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(
    gsm8k: ModuleType, source: Path, tmp_path: Path, line: str, message: str
) -> None:
    path = source / "train.jsonl"
    path.write_bytes(path.read_bytes().rstrip() + b"\n" + line.encode().decode("unicode_escape").encode("latin-1"))
    with pytest.raises(SystemExit, match=message):
        gsm8k.main(["--local_dir", str(tmp_path / "out"), "--source", str(source)])
    assert list((tmp_path / "out").iterdir()) == []


def test_a_missing_file_is_named_and_nothing_is_written(gsm8k: ModuleType, source: Path, tmp_path: Path) -> None:
    (source / "test.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"there is no file .*test\.jsonl.*; --source is a folder"):
        gsm8k.main(["--local_dir", str(tmp_path / "out"), "--source", str(source)])
    assert list((tmp_path / "out").iterdir()) == []


def test_a_missing_network_is_reported_with_a_remedy(
    gsm8k: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(SystemExit, match=r"cannot load openai/gsm8k .*: no route; .* with --source"):
        gsm8k.main(["--local_dir", str(tmp_path / "out")])


def test_rows_of_the_hub_are_taken(gsm8k: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*names: str, split: str, streaming: bool) -> datasets.IterableDataset:
        asked.append((*names, split))
        assert streaming
        return datasets.Dataset.from_list(LINES).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    gsm8k.main(["--local_dir", str(tmp_path)])
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert pq.read_metadata(tmp_path / "train.parquet").num_rows == 2


@pytest.mark.skipif(not ORIGINALS.is_dir(), reason="the data set's original files are not here")
def test_the_real_files_become_a_loaders_prompts(tmp_path: Path) -> None:
    command = [sys.executable, "data_preprocess/gsm8k.py", "--local_dir", str(tmp_path), "--source", str(ORIGINALS)]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "train.parquet: 7,473 rows\n" in output and "test.parquet: 1,319 rows\n" in output
    tokenizer = make_tokenizer(TokenizerSpec(kind="bytes"))
    loader = PromptLoader(tmp_path / "train.parquet", tokenizer, max_prompt_tokens=400, overlong="drop")
    piece = loader.read(range(0, len(loader), 7))
    assert 0 < len(piece.dropped) == len(range(0, len(loader), 7)) - len(piece.rows)
    for tokens, answer, extra in zip(
        (piece.columns["prompt_tokens"][row] for row in range(len(piece.rows))),
        piece.columns["answer"].strings(),
        map(json.loads, piece.columns["extra_info"].strings()),
        strict=True,
    ):
        assert len(tokens) <= 400
        assert tokenizer.decode(tokens).startswith(extra["question"])
        assert extra["answer"].replace(",", "").endswith(f"#### {answer}")
