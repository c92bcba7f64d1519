"""Statistics of prompt files: lengths, duplicates, and the overlap of training and validation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagrl.config.schema import SourceSpec
from dagrl.data.prompt_stats import FileStats, file_stats, overlap
from dagrl.data.sources import open_source

WORDS = [f"word{number}" for number in range(17)]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FileStats]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(name: str, rows: list[dict[str, Any]], **options: Any) -> FileStats:
        path = tmp_path / name
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file_stats(open_source(name, SourceSpec(path=path)), lambda texts: [*map(len, texts)], **options)

    return make


def chat(text: str, system: str = "Be brief.") -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_rows_of_the_usual_schema_are_measured_without_system_messages(read, ending) -> None:
    rows = [
        {"prompt": chat(text), "data_source": source, "reward_model": {"ground_truth": answer}}
        for text, source, answer in [
            ("How many?", "a", "12"),
            ("how  MANY?", "b", "12"),
            ("", "b", ""),
            ("Why?", "a", "x"),
        ]
    ]
    stats = read(f"rows.{ending}", rows, scores=lambda answer: "math" if answer.isdigit() else "")
    assert stats.prompt_lengths.tolist() == [9, 10, 0, 4]
    assert stats.answer_lengths.tolist() == [2, 2, 0, 1]
    assert stats.sources == {"a": 2, "b": 2}
    assert stats.repeated().tolist() == [1]
    assert stats.contradicting().tolist() == []
    assert (stats.empty, stats.unscored, stats.rewards) == ([2], [2, 3], {"math": 2, "": 2})


def test_columns_of_other_schemas_are_found_or_named(read) -> None:
    rows = [{"question": "a?", "answer": "1"}, {"question": "A?", "answer": "2"}]
    stats = read("q.jsonl", rows)
    assert (stats.prompt_key, stats.answer_key) == ("question", "answer")
    assert stats.repeated().tolist() == stats.contradicting().tolist() == [1]
    assert stats.places([1])[0].endswith("q.jsonl:2")
    assert read("p.jsonl", rows, prompt_key="answer").prompt_key == "answer"
    assert read("no_answer.jsonl", [{"prompt": "a?"}]).answer_key is None
    for key, value in (("prompt_key", "nothing"), ("answer_key", "x.y")):
        with pytest.raises(ValueError, match=f"has no column `{value}`, only .*question.* and .*; name another"):
            read("again.jsonl", rows, **{key: value})
    with pytest.raises(ValueError, match="has no column `prompt`"):
        read("other.jsonl", [{"title": "a", "body": "b"}])


def test_prompts_that_validation_shares_with_training_are_the_same_or_similar(read) -> None:
    text = " ".join(WORDS)
    train = read("train.jsonl", [{"prompt": text}, {"prompt": "What is 2 + 2?"}, {"prompt": ""}])
    other = " ".join(Random(0).sample(WORDS, len(WORDS)))
    prompts = [
        *(text.upper(), "what is  2 + 2?", f"Now: {text}, they say", other, ""),
        # Thirteen words, and twelve.
        *(f"unlike {' '.join(WORDS[:13])} texts", f"unlike {' '.join(WORDS[:12])} texts", "What is 2 - 2?"),
    ]
    found = overlap([train], read("val.jsonl", [{"prompt": each} for each in prompts]))
    assert (found.same.tolist(), found.similar.tolist(), found.mostly.tolist()) == ([0, 1], [2, 5], [2])


def test_the_instruction_of_all_prompts_is_no_overlap(read) -> None:
    def rows(first: int) -> list[dict[str, str]]:
        return [{"prompt": f"Problem {number}. {' '.join(WORDS)}"} for number in range(first, first + 30)]

    found = overlap([read("train.jsonl", rows(0))], read("val.jsonl", rows(100)))
    assert (len(found.same), len(found.similar)) == (0, 0)


def test_every_copied_passage_is_found_wherever_it_stands(read) -> None:
    random = Random(3)
    words = [f"w{number}" for number in range(5000)]
    train = [" ".join(random.choices(words, k=random.randint(1, 60))) for _ in range(300)]
    val, copied = [], []
    for row in range(60):
        parts = random.choices(words, k=random.randint(0, 30))
        if row % 3 == 0 and len(source := random.choice(train).split()) >= 13:
            begin = random.randint(0, len(source) - 13)
            parts[len(parts) // 2 : len(parts) // 2] = source[begin : begin + 13]
            copied.append(row)
        val.append(" ".join(parts) or "nothing")
    found = overlap(
        [
            read("a.jsonl", [{"prompt": each} for each in train[:150]]),
            read("b.jsonl", [{"prompt": each} for each in train[150:]]),
        ],
        read("val.jsonl", [{"prompt": each} for each in val]),
    )
    assert sorted(np.union1d(found.same, found.similar).tolist()) == copied


@pytest.mark.parametrize("name", ["prompt", "answer", "data_source"])
def test_columns_of_a_name_are_told(tmp_path, name) -> None:
    table = pa.table({each: ["2"] for each in ("prompt", "answer", "data_source")})
    pq.write_table(table.append_column(name, table[name]), tmp_path / "a.parquet")
    source = open_source("sums", SourceSpec(path=tmp_path / "a.parquet"))
    with pytest.raises(ValueError, match=rf"a\.parquet has 2 columns `{name}`; keep one of them"):
        file_stats(source, lambda texts: [*map(len, texts)])
