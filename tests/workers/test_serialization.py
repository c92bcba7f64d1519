"""Parcels: what is packed comes out again, and weighs metadata and ids, never the columns."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray
from work import work_of

from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.ops.work import ColumnSource, PartWork, ScoreWork
from dagrl.workers.messages import Block
from dagrl.workers.serialization import deserialize, message_bytes, serialize

BYTES_OF_AN_ID = len(ray.ObjectRef.from_random().binary())


def work_on(rows: int, refs: list[ray.ObjectRef]) -> ScoreWork:
    """One rank's share: rows of these blocks."""
    columns = {"prompt_tokens": "prompt_tokens", "response_tokens": "response_tokens"}
    part = PartWork(0, np.arange(rows), (ColumnSource(tuple(refs), columns),))
    return work_of(ScoreWork, "ref", op="logprob", parts=(part,), outputs={"logprob": "ref_logprob"})


def block_of(response_lengths: list[int]) -> Block:
    """What a rank says when it has put responses of these lengths into the store."""
    rows = np.arange(len(response_lengths))
    lengths = np.array(response_lengths)
    return Block(rows, ray.ObjectRef.from_random(), lengths, 0.0, 1.0, (0,), {"reward": Stat.of(lengths)})


def size_of(message: Any) -> int:
    return message_bytes(*serialize(message))


def test_a_message_survives_serialization_and_has_each_ref_once() -> None:
    refs = [ray.ObjectRef.from_random() for _ in range(3)]
    work = work_on(12, [*refs, refs[0]])
    data, beside = serialize(work)
    assert beside == refs
    out = deserialize(data, beside)
    (mine,), (theirs,) = work.parts, out.parts
    assert theirs.sources == mine.sources
    assert theirs.rows.tolist() == mine.rows.tolist()
    assert replace(out, parts=()) == replace(work, parts=())
    assert all(ref.binary() not in data for ref in refs), "Ray has to see the refs, or it would drop their objects"


def test_columns_leave_the_message_and_a_ref_takes_their_place() -> None:
    batch = Batch(np.arange(3), {"reward": Column(np.ones(3))})
    first, second = (replace(block_of([5, 7, 6]), ref=batch) for _ in range(2))
    data, beside = serialize([first, second])
    assert len(beside) == 1 and beside[0] is batch
    assert [block.ref for block in deserialize(data, ["the object"])] == ["the object"] * 2


def test_a_ref_counts_as_its_id() -> None:
    none, one, three = (size_of([ray.ObjectRef.from_random() for _ in range(count)]) for count in (0, 1, 3))
    assert BYTES_OF_AN_ID <= one - none < BYTES_OF_AN_ID + 16
    assert 2 * BYTES_OF_AN_ID <= three - one < 2 * (BYTES_OF_AN_ID + 16)


def test_a_message_without_refs_counts_its_pickled_size() -> None:
    message = {"rows": np.arange(100), "name": "reward"}
    assert size_of(message) == pytest.approx(len(pickle.dumps(message, protocol=5)), abs=8)


def test_work_grows_with_its_rows_by_their_ids() -> None:
    refs = [ray.ObjectRef.from_random() for _ in range(2)]
    small, large = size_of(work_on(100, refs)), size_of(work_on(1100, refs))
    # Eight bytes each.
    assert large - small == pytest.approx(1000 * 8, rel=0.01)
    assert small < 100 * 12 + 2 * BYTES_OF_AN_ID + 2000


def test_the_size_of_a_block_does_not_depend_on_its_columns() -> None:
    short, long = block_of([1] * 50), block_of([100_000] * 50)
    assert abs(size_of(long) - size_of(short)) < 16
    assert size_of(block_of([1] * 150)) - size_of(short) == pytest.approx(100 * (8 + 8), rel=0.01)


def test_a_message_of_another_version_is_refused() -> None:
    data, beside = serialize("hello")
    assert deserialize(data, beside) == "hello"
    with pytest.raises(ValueError, match=r"protocol version \d+, and this process \d+; install the same dagrl"):
        deserialize(bytes([data[0] + 1]) + data[1:], beside)


def test_a_class_that_other_environments_may_lack_is_refused() -> None:
    data, beside = serialize([pytest.Package])
    with pytest.raises(pickle.UnpicklingError, match=r"_pytest\S+Package, which other environments may lack"):
        deserialize(data, beside)
