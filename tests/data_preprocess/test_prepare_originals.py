"""Where rows come from: files of every kind, in order and with their places; the hubs."""

from __future__ import annotations

import gzip
import io
import sys
import types
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture
def read(load_script):
    """(place, question) of the rows that gsm8k's description finds."""
    gsm8k = load_script("gsm8k").GSM8K
    from dagrl.data.prepare.originals import records

    def rows(source: Path | None, hub: str = "huggingface", hub_name: str | None = None) -> list[tuple[str, str]]:
        found = records(gsm8k.originals["train"], "train", source, hub, hub_name)
        return [(record.place, record["question"]) for record in found]

    return rows


ROWS = [{"question": f"q{number}", "answer": "#### 1"} for number in range(3)]


def test_json_lines_are_reported_by_number(originals, read) -> None:
    folder = originals(train_DOT_jsonl=ROWS)
    (folder / "train.jsonl").write_text("\n" + (folder / "train.jsonl").read_text())
    assert read(folder) == [(f"{folder}/train.jsonl:{number + 2}", f"q{number}") for number in range(3)]


@pytest.mark.parametrize("separator", [None, "\n", " ", "\n\n  "])
def test_json_is_a_list_or_one_row_after_the_other(originals, read, separator: str | None) -> None:
    import json

    folder = originals(train_DOT_json=ROWS)
    if separator is not None:
        text = separator.join(json.dumps(row, indent=1) for row in ROWS)
        (folder / "train.json").write_text(f"\n{text}\n")
    assert [text for _, text in read(folder)] == ["q0", "q1", "q2"]
    assert read(folder)[2][0] == f"{folder}/train.json, row 2 (the first is 0)"


def test_parquet_is_read_in_pieces_in_order(originals, read) -> None:
    folder = originals(data__train_1_DOT_jsonl=[])
    many = [{"question": f"q{number}", "answer": "#### 1"} for number in range(1000)]
    for part in (0, 1, 10, 2):
        pq.write_table(pa.Table.from_pylist(many[:400] if part == 10 else many), folder / f"data/train-{part}.parquet")
    found = read(folder)
    assert len(found) == 3400
    assert found[999][0] == f"{folder}/data/train-0.parquet, row 999 (the first is 0)"
    # 2 before 10
    assert found[-1] == (f"{folder}/data/train-10.parquet, row 399 (the first is 0)", "q399")


def test_compressed_originals_are_read(originals, read) -> None:
    folder = originals(train_DOT_jsonl=ROWS)
    plain = folder / "train.jsonl"
    (folder / "train.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert read(folder) == [(f"{folder}/train.jsonl.gz:{number + 1}", f"q{number}") for number in range(3)]


def test_a_clone_of_the_hubs_repository_is_found_by_its_configuration(originals, read) -> None:
    name = "-00000-of-00001_DOT_parquet"
    folder = originals(**{f"main__train{name}": ROWS[:1], f"socratic__train{name}": ROWS})
    assert [text for _, text in read(folder)] == ["q0"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.json", b'[{"question": "a"', r"train\.json: not JSON: "),
        ("train.json", b"\xff\xfe", r"train\.json: not JSON: "),
        ("train.json", b'["a"]', r"train\.json, row 0 .*: not an object with fields, but \"a\""),
        (
            "train.jsonl.gz",
            gzip.compress(b"{}" * 99)[:-9],
            r"train\.jsonl\.gz cannot be unpacked \(.*\); fetch it again",
        ),
        ("train.jsonl.gz", b"no", r"train\.jsonl\.gz cannot be unpacked \(.*\); fetch it again"),
        ("train.parquet", b"PAR1 nothing", r"train\.parquet cannot be read as parquet \(.*\); fetch it again"),
    ],
)
def test_broken_files_are_named(originals, read, name: str, content: bytes, message: str) -> None:
    folder = originals()
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(folder)


def test_the_hub_streams_and_leaves_images_encoded(load_script, tmp_path: Path, monkeypatch) -> None:
    from PIL import Image

    picture = io.BytesIO()
    Image.new("RGB", (2, 2), "red").save(picture, "PNG")
    features = datasets.Features(
        {"problem": datasets.Value("string"), "answer": datasets.Value("string"), "images": [datasets.Image()]}
    )
    row = {"problem": "<image>How red?", "answer": "very", "images": [{"bytes": picture.getvalue(), "path": None}]}
    datasets.Dataset.from_list([row], features=features).to_parquet(tmp_path / "hub.parquet")
    real, asked = datasets.load_dataset, []

    def load_dataset(*names: str, split: str, streaming: bool) -> datasets.IterableDataset:
        asked.append((*names, split))
        return real("parquet", data_files={split: str(tmp_path / "hub.parquet")}, split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load_script("geo3k").main(["--local_dir", str(tmp_path / "out"), "--hub_name", "me/copy", "--hub_split", "dev"])
    assert asked == [("me/copy", "dev"), ("me/copy", "dev")]
    (written,) = pq.read_table(tmp_path / "out" / "train.parquet")["images"].to_pylist()
    assert written == [{"bytes": picture.getvalue(), "path": None}]


def test_a_hub_that_fails_during_a_download_is_reported(load_script, tmp_path: Path, monkeypatch) -> None:
    def rows():
        yield ROWS[0]
        raise ConnectionError("reset by peer\nand more")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(rows))
    with pytest.raises(SystemExit, match=r"cannot load openai/gsm8k from the Hugging Face hub: .*; without network"):
        load_script("gsm8k").main(["--local_dir", str(tmp_path / "out")])
    assert list((tmp_path / "out").iterdir()) == []


def test_files_that_datasets_cannot_read_are_fetched(originals, load_script, tmp_path: Path, monkeypatch) -> None:
    import huggingface_hub

    row = {"question": "Add.", "input_output": '{"inputs": ["1 2"], "outputs": ["3"]}'}
    folder = originals(train_DOT_jsonl=[row], test_DOT_jsonl=[row])
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((a, k)) or str(folder))
    load_script("apps").main(["--local_dir", str(tmp_path / "out")])
    (name,), options = asked[0]
    assert (name, options["repo_type"], options["allow_patterns"][0]) == ("codeparrot/apps", "dataset", "train.jsonl")
    assert pq.read_metadata(tmp_path / "out" / "test.parquet").num_rows == 1


def test_modelscope_is_asked_for_the_files(originals, read, monkeypatch) -> None:
    folder = originals(train_DOT_jsonl=ROWS)
    asked = []
    package = types.ModuleType("modelscope")
    package.dataset_snapshot_download = lambda name, **options: asked.append((name, options)) or str(folder)
    monkeypatch.setitem(sys.modules, "modelscope", package)
    assert len(read(None, hub="modelscope")) == 3
    assert len(read(None, hub="modelscope", hub_name="me/copy")) == 3
    assert [name for name, _ in asked] == ["openai/gsm8k", "me/copy"]
    assert asked[0][1]["allow_patterns"][0] == "main/train-*.parquet"

    def fail(name: str, **_: object) -> str:
        raise RuntimeError(f"404 {name}")

    package.dataset_snapshot_download = fail
    with pytest.raises(ValueError, match="cannot load openai/gsm8k from ModelScope: 404 openai/gsm8k; without network"):
        read(None, hub="modelscope")


def test_a_missing_modelscope_package_is_reported_with_a_remedy(read, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ValueError, match=r"needs its package \(.*\); pip install modelscope"):
        read(None, hub="modelscope")
