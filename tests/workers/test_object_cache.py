"""The rows of a part, from wherever they lie, in the order that the op gets them."""

from __future__ import annotations

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from refs import Ref

from dagrl.data.batch import Batch, Column
from dagrl.data.redistribute import RowIndex
from dagrl.ops.work import ColumnSource, PartialRollout, PartWork
from dagrl.workers.object_cache import ObjectCache


def block_of(rows: list[int]) -> Batch:
    """Row r has the tokens [r] * (r % 4) and the reward r / 2."""
    return Batch(
        np.array(rows, dtype=np.int64),
        {
            "response_tokens": Column.ragged([[row] * (row % 4) for row in rows], "int64"),
            "reward": Column(np.array(rows, dtype=np.float32) / 2),
        },
    )


def fetched(store: dict[str, Batch], rows: list[int], *sources: ColumnSource) -> Batch:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get", lambda refs, timeout: [store[ref] for ref in refs])
        (part,) = ObjectCache(1.0, keep=False).parts(1, [PartWork(0, np.array(rows, dtype=np.int64), sources)])
        return part.batch


def tokens_of(batch: Batch, name: str) -> list[list[int]]:
    return [batch[name][row].tolist() for row in range(len(batch))]


@given(data=st.data(), count=st.integers(1, 12), blocks=st.integers(1, 4))
def test_rows_come_in_the_parts_order_however_they_lie(data, count: int, blocks: int) -> None:
    stored = data.draw(st.permutations(range(count)))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), min_size=blocks - 1, max_size=blocks - 1)))
    pieces = [stored[begin:end] for begin, end in zip([0, *cuts], [*cuts, count], strict=True)]
    wanted = data.draw(st.permutations(data.draw(st.lists(st.sampled_from(stored), min_size=1, unique=True))))
    columns = {"tokens": "response_tokens", "reward": "reward"}
    index = RowIndex()
    for piece in pieces:
        index.add(np.array(piece, dtype=np.int64))
    found = index.find(np.array(wanted))
    source = ColumnSource(tuple(Ref(ref) for ref in found.tolist()), columns)
    store = {str(ref): block_of(piece) for ref, piece in enumerate(pieces)}
    batch = fetched(store, wanted, source)
    assert batch.rows.tolist() == wanted
    assert set(batch.columns) == {"tokens", "reward"}
    assert tokens_of(batch, "tokens") == [[row] * (row % 4) for row in wanted]
    assert batch["reward"].values.tolist() == [row / 2 for row in wanted]


def test_columns_of_several_producers_meet_by_row_under_the_ops_names() -> None:
    store = {"a": block_of([5, 3]), "b": block_of([7, 5]), "c": block_of([9, 3])}
    batch = fetched(
        store,
        [3, 5],
        ColumnSource((Ref("a"),), {"mine": "response_tokens"}),
        ColumnSource((Ref("b"), Ref("c")), {"score": "reward"}),
    )
    assert tokens_of(batch, "mine") == [[3, 3, 3], [5]]
    assert batch["score"].values.tolist() == [1.5, 2.5]


def test_a_row_that_several_blocks_hold_comes_out_of_the_first() -> None:
    again = Batch(np.array([2, 3]), {"reward": Column(np.array([20.0, 30.0]))})
    batch = fetched(
        {"a": block_of([1, 2]), "b": again}, [3, 2], ColumnSource((Ref("a"), Ref("b")), {"reward": "reward"})
    )
    assert batch["reward"].values.tolist() == [30.0, 1.0]


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Refs of blocks that were read, in their order."""
    refs_read: list[str] = []

    def get(refs: list[str], timeout: float) -> list[Batch]:
        refs_read.extend(refs)
        return [block_of([int(ref), int(ref) + 1]) for ref in refs]

    monkeypatch.setattr(ray, "get", get)
    return refs_read


def reward_of(rows: list[int], *refs: str, index: int = 0) -> PartWork:
    return PartWork(index, np.array(rows), (ColumnSource(tuple(map(Ref, refs)), {"r": "reward"}),))


def test_parts_with_the_same_blocks_read_them_once(asked) -> None:
    works = [reward_of([1], "1"), reward_of([2], "1", index=1)]
    parts = ObjectCache(1.0, keep=False).parts(1, works)
    assert [(part.index, part.batch["r"].values.tolist()) for part in parts] == [(0, [0.5]), (1, [1.0])]
    assert asked == ["1"]


def test_an_engine_fetches_blocks_once_until_their_step_is_committed(asked) -> None:
    blocks = ObjectCache(1.0, keep=True)
    blocks.parts(4, [reward_of([1], "1")])
    blocks.parts(5, [reward_of([7], "7")])
    (part,) = blocks.parts(4, [reward_of([2, 3], "1", "3")])
    assert part.batch["r"].values.tolist() == [1.0, 1.5]
    assert asked == ["1", "7", "3"]
    blocks.forget(4)
    blocks.parts(5, [reward_of([8], "7")])
    blocks.parts(4, [reward_of([1], "1")])
    assert asked == ["1", "7", "3", "1"]


def test_cpu_workers_cache_nothing_between_calls(asked) -> None:
    blocks = ObjectCache(1.0, keep=False)
    for _ in range(2):
        blocks.parts(4, [reward_of([1], "1")])
    assert asked == ["1", "1"]


def test_a_partial_rollout_has_the_groups_order_and_the_ops_names(asked) -> None:
    names = {"tokens": "response_tokens", "logprobs": "response_logprobs"}
    batch = ObjectCache(1.0, keep=True).partial_rollout(PartialRollout(Ref("5"), np.array([6, 5])), names)
    assert (batch.rows.tolist(), set(batch.columns)) == ([6, 5], {"tokens"}), "what it has not is left out"
    assert tokens_of(batch, "tokens") == [[6, 6], [5]]


def test_a_rank_without_rows_gets_columns_of_the_right_types() -> None:
    batch = fetched({"a": block_of([1, 2])}, [], ColumnSource((Ref("a"),), {"tokens": "response_tokens"}))
    assert len(batch) == 0
    assert (batch["tokens"].values.dtype, batch["tokens"].offsets.tolist()) == (np.int64, [0])


def test_a_row_that_no_source_brings_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="row 9 is not in the batch"):
        fetched({"a": block_of([1, 2])}, [1, 9], ColumnSource((Ref("a"),), {"reward": "reward"}))
