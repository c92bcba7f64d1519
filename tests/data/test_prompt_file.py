"""Files of prompts are written whole or not at all, and are read back by the loader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagrl.config.schema import TokenizerSpec
from dagrl.data.prompt_file import PromptRow, write_prompts
from dagrl.data.prompts import PromptLoader
from dagrl.model_files.tokenizer import make_tokenizer

EXTRA = {"index": pa.int64()}


def rows(count: int) -> Iterator[PromptRow]:
    return (PromptRow("demo", f"q{index}", str(index), {"index": index}) for index in range(count))


def test_the_file_has_verls_schema(tmp_path: Path) -> None:
    assert write_prompts(tmp_path / "deep" / "train.parquet", rows(3), EXTRA) == 3
    assert pq.read_table(tmp_path / "deep" / "train.parquet").to_pylist()[2] == {
        "data_source": "demo",
        "prompt": [{"content": "q2", "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 2},
    }
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["train.parquet"]


def test_the_loader_reads_many_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    assert write_prompts(path, rows(20_000), EXTRA) == 20_000
    assert pq.ParquetFile(path).num_row_groups == 3
    tokenizer = make_tokenizer(TokenizerSpec(kind="bytes"))
    loader = PromptLoader(path, tokenizer, max_prompt_tokens=9, overlong="error")
    piece = loader.read([19_999, 0])
    assert piece.columns["answer"].strings() == ["19999", "0"]
    assert piece.columns["extra_info"].strings() == ['{"index": 19999}', '{"index": 0}']


def test_a_failure_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    write_prompts(path, rows(2), EXTRA)

    def failing() -> Iterator[PromptRow]:
        yield from rows(10_000)
        raise ValueError("line 10001 is bad")

    with pytest.raises(ValueError, match="line 10001"):
        write_prompts(path, failing(), EXTRA)
    assert pq.read_metadata(path).num_rows == 2
    assert [file.name for file in tmp_path.iterdir()] == ["train.parquet"]


def test_chats_and_further_columns_are_written(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    row = PromptRow("demo", chat, "2", {"index": 0}, columns={"images": [b"\x00\xff"]})
    columns = {"images": pa.list_(pa.binary())}
    assert write_prompts(tmp_path / "a.parquet", [row] * 5, EXTRA, columns, rows_per_group=2) == 5
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 3
    (written, *_) = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert (written["prompt"], written["images"]) == (chat, [b"\x00\xff"])
