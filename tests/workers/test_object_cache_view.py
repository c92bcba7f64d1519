"""Work that is abridged on one side reads the same rows on the other, and no object is brought there twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from work import work_of

from dagrl.data.batch import Batch, Column
from dagrl.ops.work import ColumnSource, PartWork, ScoreWork
from dagrl.workers.object_cache import CacheView, ObjectCache
from dagrl.workers.serialization import deserialize, serialize


class Store:
    """Objects, and how often each was read."""

    def __init__(self) -> None:
        self.objects: dict[ray.ObjectRef, Batch] = {}
        self.read: list[ray.ObjectRef] = []

    def put(self, rows: Sequence[int], factor: int) -> ray.ObjectRef:
        ref = ray.ObjectRef.from_random()
        self.objects[ref] = Batch(np.array(rows), {"x": Column(factor * np.array(rows))})
        return ref

    def get(self, refs: list[ray.ObjectRef], timeout: float) -> list[Batch]:
        self.read += refs
        return [self.objects[ref] for ref in refs]


@pytest.fixture
def store(monkeypatch) -> Store:
    store = Store()
    monkeypatch.setattr(ray, "get", store.get)
    return store


def work_on(*sources: ColumnSource, step: int = 1, committed: int = 0, rows: Sequence[int] = (2, 1)) -> ScoreWork:
    parts = (PartWork(0, np.array(rows), sources),)
    return work_of(ScoreWork, "ref", step=step, committed=committed, parts=parts)


class Worker:
    """Both sides: the driver's book of a worker, and what that worker keeps."""

    def __init__(self) -> None:
        self.view, self._cache = CacheView(), ObjectCache(1.0, keep=True)

    def does(self, work: ScoreWork, made: Batch | None = None, told_as: ray.ObjectRef | None = None) -> dict[str, Any]:
        """What it reads for some work, of which it makes something that the driver knows by a ref."""
        sent = self.view.use_keys(work)
        if told_as is not None:
            self.view.add_output(told_as, sent)
        arrived: ScoreWork = deserialize(*serialize(sent))
        self._cache.forget(arrived.committed)
        (part,) = self._cache.parts(arrived.step, arrived.parts)
        if made is not None:
            self._cache.put(arrived.step, arrived.cache_as, made)
        return {name: column.values.tolist() for name, column in part.batch.columns.items()}


def test_cached_objects_are_named_by_key(store) -> None:
    worker, tokens = Worker(), store.put([1, 2, 3], 10)
    read = ColumnSource((tokens,), {"tokens": "x"})
    made, logprobs = Batch(np.array([1, 2]), {"x": Column(np.array([-1, -2]))}), ray.ObjectRef.from_random()
    assert worker.does(work_on(read), made, logprobs) == {"tokens": [20, 10]}
    advantages = store.put([2, 1], 100)
    update = work_on(read, ColumnSource((logprobs,), {"old": "x"}), ColumnSource((advantages,), {"advantage": "x"}))
    assert worker.does(update) == {"tokens": [20, 10], "old": [-2, -1], "advantage": [200, 100]}
    assert store.read == [tokens, advantages]


def test_an_object_that_work_names_twice_is_fetched_once(store) -> None:
    worker, both = Worker(), store.put([1, 2], 10)
    twice = work_on(ColumnSource((both,), {"tokens": "x"}), ColumnSource((both,), {"again": "x"}))
    assert worker.does(twice) == {"tokens": [20, 10], "again": [20, 10]}
    assert store.read == [both]


def test_both_sides_forget_a_committed_step(store) -> None:
    worker, tokens = Worker(), store.put([1, 2], 10)
    read = ColumnSource((tokens,), {"tokens": "x"})
    worker.does(work_on(read, step=1))
    worker.does(work_on(read, step=2))
    assert store.read == [tokens] * 2, "each step keeps its own"
    worker.does(work_on(step=3, committed=1, rows=()))
    assert worker.does(work_on(read, step=2, committed=1)) == {"tokens": [20, 10]}
    assert store.read == [tokens] * 2
    worker.does(work_on(step=3, committed=2, rows=()))
    assert worker.does(work_on(read, step=2, committed=2)) == {"tokens": [20, 10]}
    assert store.read == [tokens] * 3


@given(data=st.data())
def test_any_work_reads_the_same_with_and_without_the_cache(data) -> None:
    """Steps overlap, and are committed one after the other; any work reads any objects of its step."""
    store, worker, committed = Store(), Worker(), 0
    objects: dict[int, list[ray.ObjectRef]] = {}
    brought: set[tuple[int, ray.ObjectRef]] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get", store.get)
        for _ in range(data.draw(st.integers(1, 12))):
            committed += data.draw(st.booleans())
            step = data.draw(st.integers(committed + 1, committed + 2))
            here = objects.setdefault(step, [store.put([1, 2], factor) for factor in (3, 5)])
            chosen = data.draw(st.lists(st.sampled_from(here), min_size=1, max_size=4))
            sources = [ColumnSource((ref,), {f"column {index}": "x"}) for index, ref in enumerate(chosen)]
            made, told_as = Batch(np.array([1, 2]), {"x": Column(np.arange(2))}), ray.ObjectRef.from_random()
            store.objects[told_as] = made
            before = len(store.read)
            expected = [[store.objects[ref]["x"].values[row] for row in (1, 0)] for ref in chosen]
            found = worker.does(work_on(*sources, step=step, committed=committed), made, told_as)
            assert list(found.values()) == expected
            news = [(step, ref) for ref in store.read[before:]]
            assert not brought & set(news) and len(news) == len(set(news))
            brought |= {*news, (step, told_as)}
            here.append(told_as)
