"""Reading ahead returns the same as a plain read, and raises errors when the prompt is requested."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.config.schema import TokenizerSpec
from dagrl.data.order.sampler import prompt_id, row_of, source_of
from dagrl.data.prompts import PromptLoader, ReadAhead, ReadPrompts
from dagrl.model_files.tokenizer import make_tokenizer

TOKENIZER = make_tokenizer(TokenizerSpec(kind="bytes"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prompts")


def loader_of(folder: Path, prompts: list[str], **options: str) -> PromptLoader:
    file = folder / f"{len(prompts)}.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": each, "data_source": "demo"} for each in prompts]), file)
    limits = {"max_prompt_tokens": 4, "overlong": "drop"} | options
    return PromptLoader(file, TOKENIZER, with_answers=False, **limits)


def reader_of(*loaders: PromptLoader) -> ReadAhead:
    names = [f"source{number}" for number in range(len(loaders))]
    return ReadAhead(names, dict(zip(names, loaders, strict=True)).__getitem__)


def texts(read: ReadPrompts) -> list[str]:
    tokens = read.batch["prompt_tokens"]
    return [TOKENIZER.decode(tokens[row]) for row in range(len(tokens))]


FIRST = [f"p{number}" if number % 5 else "too long" for number in range(7)]
SECOND = [f"q{number}" for number in range(4)]
IDS = st.sampled_from([*(prompt_id(0, row) for row in range(7)), *(prompt_id(1, row) for row in range(4))])


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(IDS, min_size=1, max_size=6), st.lists(IDS, max_size=6)), max_size=6))
def test_prompts_come_as_without_reading_ahead(folder: Path, calls: list) -> None:
    reader = reader_of(loader_of(folder, FIRST), loader_of(folder, SECOND))
    for ids, ahead in calls:
        read = reader.read(ids, ahead)
        all_texts = [(FIRST, SECOND)[source_of(each)][row_of(each)] for each in ids]
        too_long = {each for each, text in zip(ids, all_texts, strict=True) if text == "too long"}
        assert set(read.dropped) == too_long
        if not too_long:
            assert (list(read.ids), texts(read)) == (ids, all_texts)
            assert read.batch["data_set"].strings() == [f"source{source_of(each)}" for each in ids]


def test_prompts_that_were_read_are_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, calls = loader_of(folder, ["a", "too long", "b", "c"]), []
    read = loader.read
    monkeypatch.setattr(loader, "read", lambda rows: calls.append(list(rows)) or read(rows))
    reader = reader_of(loader)
    assert reader.read([0, 1], ahead=[3]).dropped == (1,)
    assert texts(reader.read([0, 2], ahead=[3, 0])) == ["a", "b"]
    assert texts(reader.read([0, 3])) == ["a", "c"]
    assert calls == [[0, 1], [2], [3, 0]]


def test_errors_of_prefetched_prompts_are_raised_when_they_are_read(folder: Path) -> None:
    reader = reader_of(loader_of(folder, ["a", "b", "too long", "c"], overlong="error"))
    assert len(reader.read([0, 1], ahead=[2, 3]).ids) == 2
    for _ in range(2):
        with pytest.raises(ValueError, match="has 8 tokens, more than max_prompt_tokens=4"):
            reader.read([2, 3])
    assert texts(reader.read([3])) == ["c"]
