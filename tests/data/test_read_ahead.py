"""What is read ahead is what would be read, and what goes wrong there is told to whoever asks for it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.config.schema import TokenizerSpec
from dagrl.data.prompts import PromptLoader
from dagrl.data.read_ahead import ReadAhead
from dagrl.model_files.tokenizer import make_tokenizer

TOKENIZER = make_tokenizer(TokenizerSpec(kind="bytes"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prompts")


def loader_of(folder: Path, prompts: list[str], **options: str) -> PromptLoader:
    file = folder / f"{len(prompts)}.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": each, "data_source": "demo"} for each in prompts]), file)
    limits = {"max_prompt_tokens": 4, "overlong": "drop", "shuffle": True, "seed": 3} | options
    return PromptLoader(file, TOKENIZER, with_answers=False, **limits)


@settings(deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 4), st.lists(st.integers(0, 9), max_size=2)),
        max_size=5,
    )
)
def test_whatever_is_asked_comes_as_without_reading_ahead(folder: Path, asked: list) -> None:
    plain = loader_of(folder, [f"p{number}" for number in range(7)])
    reader = ReadAhead(loader_of(folder, [f"p{number}" for number in range(7)]))
    position = 0
    for goes_on, elsewhere, more, first in asked:
        position, count = position if goes_on else elsewhere, len(first) + more
        taken, expected = reader.take(position, count, first=first), plain.take(position, count, first=first)
        assert taken.positions.tolist() == expected.positions.tolist()
        assert taken.columns["prompt_tokens"].values.tolist() == expected.columns["prompt_tokens"].values.tolist()
        assert taken.next_position == expected.next_position
        position = taken.next_position


def test_prefetched_prompts_are_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, calls = loader_of(folder, ["a", "b", "c"]), []
    take = loader.take
    monkeypatch.setattr(loader, "take", lambda *asked, **first: calls.append(asked) or take(*asked, **first))
    reader = ReadAhead(loader)
    for position in (0, 2, 4):
        reader.take(position, 2)
    reader._thread.shutdown()
    assert calls == [(0, 2), (2, 2), (4, 2), (6, 2)]


def test_errors_of_prefetched_prompts_are_raised_when_they_are_read(folder: Path) -> None:
    reader = ReadAhead(loader_of(folder, ["a", "b", "too long", "c"], overlong="error", shuffle=False))
    assert len(reader.take(0, 2).positions) == 2
    for _ in range(2):
        with pytest.raises(ValueError, match="has 8 tokens, more than max_prompt_tokens=4"):
            reader.take(2, 2)
    assert reader.take(3, 1).positions.tolist() == [3]
