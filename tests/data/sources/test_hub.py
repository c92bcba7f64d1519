"""Data sets of the Hub, with the Hub's files in a folder: downloaded, and read row group by row group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagrl.config.schema import TrainSourceSpec, ValSetSpec
from dagrl.data.sources import open_source


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of ``me/sums``, the only data set there is."""
    folder = tmp_path / "hub"
    folder.mkdir()
    for split, rows in (("train", 50), ("test", 3)):
        table = pa.table({"question": [f"{split} {row}" for row in range(rows)]})
        pq.write_table(table, folder / f"{split}-00000-of-00001.parquet", row_group_size=20)
    real = datasets.load_dataset_builder

    def load(name: str, config: str | None, revision: str | None = None) -> Any:
        if name != "me/sums":
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub.\nMore.")
        if config not in (None, "default"):
            raise ValueError(f"BuilderConfig '{config}' not found. Available: ['default']")
        if revision not in (None, "v1"):
            raise datasets.exceptions.DatasetNotFoundError(f"Revision '{revision}' doesn't exist for {name}.")
        return real(str(folder), cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    return folder


@pytest.mark.parametrize("streamed", [False, True])
def test_splits_are_read_by_row(hub: Path, streamed: bool) -> None:
    source = open_source("sums", TrainSourceSpec(hub="me/sums@v1", prompt_key="question", streamed=streamed))
    assert source.values([49, 0, 21], ["question"])["question"] == ["train 49", "train 0", "train 21"]
    assert (len(source), source.title) == (50, "me/sums@v1")
    assert len(open_source("sums", ValSetSpec(hub="me/sums", streamed=streamed))) == 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"hub": "me/gone"},
            "cannot load me/gone from the Hugging Face Hub: Dataset 'me/gone' doesn't exist on the Hub;",
        ),
        ({"hub": "me/sums@v2"}, "Revision 'v2' doesn't exist"),
        ({"hub": "me/sums", "name": "other"}, r"cannot load me/sums, other from .* Available: \['default'\]; check"),
        ({"hub": "me/sums", "split": "trian"}, r"me/sums has no split `trian`; did you mean `train`\?"),
    ],
)
def test_what_the_hub_does_not_have(hub: Path, keys: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_source("sums", TrainSourceSpec(**keys))
    assert "\n" not in str(caught.value)


def test_other_files_than_parquet_are_not_streamed(hub: Path) -> None:
    for path in hub.iterdir():
        path.unlink()
    (hub / "train.jsonl").write_text('{"question": "a"}\n')
    assert len(open_source("sums", TrainSourceSpec(hub="me/sums"))) == 1
    with pytest.raises(ValueError, match=r"other files than parquet .*train\.jsonl\); set `streamed: false`"):
        open_source("sums", TrainSourceSpec(hub="me/sums", streamed=True))
