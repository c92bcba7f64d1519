"""Data sets of the Hub, with the Hub's files in a folder: downloaded, and read row group by row group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import HubServer

from dagrl.config.loading.prompt_files import PromptFile
from dagrl.config.schema import TrainSourceSpec, ValSetSpec
from dagrl.data.sources import open_source
from dagrl.data.sources.parts import RemotePart


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


OPENED = """
import sys, time
from dagrl.config.schema import TrainSourceSpec
from dagrl.data.sources import open_source

time.sleep = lambda seconds: None  # between attempts to reach the Hub
for name in sys.argv[1:]:
    for streamed in (False, True):
        try:
            source = open_source("sums", TrainSourceSpec(hub=name, prompt_key="question", streamed=streamed))
            print(len(source), *source.values([49, 0], ["question"])["question"])
        except ValueError as error:
            print(error)
"""


def opened_from(address: str, home: Path, *names: str) -> list[str]:
    """Results of data sets, each downloaded and streamed, in a process whose Hub has this address."""
    variables = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", OPENED, *names]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_libraries_load_and_stream_from_a_server_that_answers_as_the_hub(hub: Path, tmp_path: Path) -> None:
    folders = {"datasets/me/sums": hub, "datasets/me/closed": hub}
    with HubServer(folders, gated=frozenset({"datasets/me/closed"})) as server:
        names = ("me/sums", "me/gone", "me/closed", "me/sums@v9")
        lines = opened_from(server.address, tmp_path / "home", *names)
        # All files are downloaded once; streams read only the requested split.
        splits = [name.partition("-")[0] for name in server.downloads]
        assert sorted(splits) == ["test", "train", "train"]
    assert lines[0] == lines[1] == "50 train 49 train 0"
    remedy = "; check the name, and set HF_TOKEN if it is private or gated"
    for streamed in (0, 1):
        gone, closed, revision = lines[2 + streamed :: 2]
        assert gone.startswith("cannot load me/gone from the Hugging Face Hub: ") and gone.endswith(remedy)
        assert "gated" in closed.removesuffix(remedy) and closed.endswith(remedy)
        assert "'v9'" in revision


def test_a_hub_that_is_away_is_one_sentence(tmp_path: Path) -> None:
    lines = opened_from("http://127.0.0.1:9", tmp_path / "home", "me/sums")
    for line in lines:
        assert line.startswith("cannot load me/sums from the Hugging Face Hub: Couldn't reach")
        assert line.endswith("; check name and network")
    assert len(lines) == 2


def test_a_connection_that_is_lost_during_the_run_is_one_sentence(hub: Path) -> None:
    class Lost:
        def __init__(self, path: Path) -> None:
            self.file, self.closed, self.lost = path.open("rb"), False, False

        def read(self, size: int = -1) -> bytes:
            if self.lost:
                raise httpx.ConnectError("Connection refused")
            return self.file.read(size)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    path = hub / "train-00000-of-00001.parquet"
    opened = Lost(path)
    part = RemotePart(PromptFile(path, "parquet"), opened)
    assert part.read(0, ["question"]).num_rows == 20
    opened.lost = True
    with pytest.raises(ValueError, match="over the network: Connection refused; check the network, or set"):
        part.read(1, ["question"])
