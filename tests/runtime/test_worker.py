"""Fetching: the rows of a part, from wherever they lie, in the order that the op gets them."""

from __future__ import annotations

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from dagrl.data.batch import Batch, Column
from dagrl.runtime.messages import PartWork, Source
from dagrl.runtime.worker import fetch


def block_of(rows: list[int]) -> Batch:
    """Row r has the tokens [r] * (r % 4) and the reward r / 2."""
    return Batch(
        np.array(rows, dtype=np.int64),
        {
            "response_tokens": Column.ragged([[row] * (row % 4) for row in rows], "int64"),
            "reward": Column(np.array(rows, dtype=np.float32) / 2),
        },
    )


def fetched(store: dict[str, Batch], rows: list[int], *sources: Source) -> Batch:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get", store.__getitem__)
        return fetch(PartWork(0, np.array(rows, dtype=np.int64), sources))


def tokens_of(batch: Batch, name: str) -> list[list[int]]:
    return [batch[name][row].tolist() for row in range(len(batch))]


@given(data=st.data(), count=st.integers(1, 12), blocks=st.integers(1, 4))
def test_rows_come_in_the_parts_order_however_they_lie(data, count: int, blocks: int) -> None:
    stored = data.draw(st.permutations(range(count)))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), min_size=blocks - 1, max_size=blocks - 1)))
    pieces = [stored[begin:end] for begin, end in zip([0, *cuts], [*cuts, count], strict=True)]
    wanted = data.draw(st.permutations(data.draw(st.lists(st.sampled_from(stored), min_size=1, unique=True))))
    columns = {"tokens": "response_tokens", "reward": "reward"}
    sources = []
    for ref, piece in enumerate(pieces):
        positions = [place for place, row in enumerate(piece) if row in wanted]
        if positions:
            whole = len(positions) == len(piece) and data.draw(st.booleans())
            sources.append(Source(str(ref), None if whole else np.array(positions), columns))
    store = {str(ref): block_of(piece) for ref, piece in enumerate(pieces)}
    batch = fetched(store, wanted, *sources)
    assert batch.rows.tolist() == wanted
    assert set(batch.columns) == {"tokens", "reward"}
    assert tokens_of(batch, "tokens") == [[row] * (row % 4) for row in wanted]
    assert batch["reward"].values.tolist() == [row / 2 for row in wanted]


def test_columns_of_several_producers_meet_by_row_under_the_ops_names() -> None:
    store = {"a": block_of([5, 3]), "b": block_of([7, 5]), "c": block_of([3])}
    batch = fetched(
        store,
        [3, 5],
        Source("a", None, {"mine": "response_tokens"}),
        Source("b", np.array([1]), {"score": "reward"}),
        Source("c", None, {"score": "reward"}),
    )
    assert tokens_of(batch, "mine") == [[3, 3, 3], [5]]
    assert batch["score"].values.tolist() == [1.5, 2.5]


def test_a_rank_without_rows_gets_columns_of_the_right_types() -> None:
    batch = fetched(
        {"a": block_of([1, 2])}, [], Source("a", np.zeros(0, dtype=np.int64), {"tokens": "response_tokens"})
    )
    assert len(batch) == 0
    assert (batch["tokens"].values.dtype, batch["tokens"].offsets.tolist()) == (np.int64, [0])


def test_a_row_that_no_source_brings_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="row 9 is not in the batch"):
        fetched({"a": block_of([1])}, [1, 9], Source("a", None, {"reward": "reward"}))
