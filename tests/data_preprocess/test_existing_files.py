"""Files that verl's and siiRL's own scripts wrote load unchanged: their ways of writing, over rows of their schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from dagrl.config.schema import SourceSpec, TokenizerSpec
from dagrl.data.prompts import PromptLoader
from dagrl.model_files.tokenizer import make_tokenizer
from dagrl.validation.data_files import _schema_problems, _Wanted


def row(index: int, **more: Any) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": f"{index}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index)},
        "extra_info": {"split": "train", "index": index, "answer": "#### 1", "question": f"{index}?"},
        **more,
    }


def loaded(path: Path) -> list[tuple[str, str, str, Any]]:
    """(prompt, answer, source, extra_info) as the loader gives them."""
    assert _schema_problems(pq.read_schema(path), _Wanted(SourceSpec(path=path), responses=(), answers=True)) == []
    tokenizer = make_tokenizer(TokenizerSpec(kind="bytes"))
    loader = PromptLoader(path, tokenizer, max_prompt_tokens=99, overlong="error")
    columns = loader.one_epoch().columns
    prompts = [tokenizer.decode(columns["prompt_tokens"][index]) for index in range(len(loader))]
    texts = (columns[name].strings() for name in ("answer", "data_source"))
    return list(zip(prompts, *texts, map(json.loads, columns["extra_info"].strings()), strict=True))


def by_datasets_map(path: Path, rows: list[dict[str, Any]]) -> None:
    """verl: Dataset.map(...).to_parquet(...), which also stores the features in the file's metadata."""
    raw = datasets.Dataset.from_dict({"number": list(range(len(rows)))})
    raw.map(lambda example: rows[example["number"]], remove_columns=["number"]).to_parquet(path)


def by_pandas(path: Path, rows: list[dict[str, Any]]) -> None:
    """siiRL and many forks: DataFrame.to_parquet; chats are arrays of dicts, and the index becomes a column."""
    frame = pd.DataFrame([{**row, "prompt": np.array(row["prompt"], dtype=object)} for row in rows])
    frame.iloc[np.arange(len(rows))].set_index(pd.Index([f"r{index}" for index in range(len(rows))])).to_parquet(path)


def by_pandas_again(path: Path, rows: list[dict[str, Any]]) -> None:
    """Read and written once more: now every list of the file has been an array."""
    by_pandas(path, rows)
    pd.read_parquet(path).to_parquet(path)


WRITERS = [by_datasets_map, by_pandas, by_pandas_again]


@pytest.mark.parametrize("write", WRITERS)
def test_the_usual_rows_load(tmp_path: Path, write: Any) -> None:
    write(tmp_path / "train.parquet", [row(index) for index in range(3)])
    expected = [(f"Think.{each}?", str(each), "openai/gsm8k", row(each)["extra_info"]) for each in range(3)]
    assert loaded(tmp_path / "train.parquet") == expected


@pytest.mark.parametrize("write", WRITERS)
def test_columns_of_agents_and_images_do_no_harm(tmp_path: Path, write: Any) -> None:
    rows = [
        row(
            index,
            agent_name="tool_agent",
            images=[{"bytes": b"\x89PNG", "path": None}],
            extra_info={
                "index": index,
                "need_tools_kwargs": True,
                "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": str(index)}}},
                "interaction_kwargs": {"query": "?", "turns": [1, 2]},
            },
        )
        for index in range(2)
    ]
    write(tmp_path / "train.parquet", rows)
    assert [extra for *_, extra in loaded(tmp_path / "train.parquet")] == [each["extra_info"] for each in rows]
    assert {"agent_name", "images"} <= set(pq.read_schema(tmp_path / "train.parquet").names)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("truth", "text"),
    [
        (["1", "one"], '["1", "one"]'),
        ({"target": ["Paris"]}, '{"target": ["Paris"]}'),
        ({"numbers": [1, 2], "target": 98}, '{"numbers": [1, 2], "target": 98}'),
        (5, "5"),
    ],
)
def test_reference_answers_that_are_no_text_become_json(tmp_path: Path, write: Any, truth: Any, text: str) -> None:
    rows = [row(0, reward_model={"style": "rule", "ground_truth": truth})]
    write(tmp_path / "train.parquet", rows)
    assert loaded(tmp_path / "train.parquet")[0][1] == text


def test_files_of_the_scripts_load_in_datasets_and_pandas(originals, prepared, tmp_path: Path) -> None:
    lines = [{"question": "1+1?", "answer": "#### 2"}]
    prepared("gsm8k_tools", originals(train_DOT_jsonl=lines), "--splits", "train")
    path = str(tmp_path / "out" / "train.parquet")
    (ours,) = datasets.load_dataset("parquet", data_files=path, split="train", cache_dir=str(tmp_path / "cache"))
    frame = pd.read_parquet(path)
    for one in (ours, frame.iloc[0]):
        assert one["prompt"][1]["content"].startswith("1+1?")
        assert one["reward_model"] == {"ground_truth": "2", "style": "rule"}
        assert one["extra_info"]["tools_kwargs"]["calculator"]["create_kwargs"]["ground_truth"] == "2"
