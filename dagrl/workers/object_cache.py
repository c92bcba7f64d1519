"""The object cache: a worker's own (`ObjectCache`) and the driver's view of it (`CacheView`).

An engine's worker keeps the objects that it reads, and its own outputs, until their step is committed: an update reads
the columns from which the log-probs of its rows were computed. Messages name such objects by key, because the worker
asks the driver about each ref in a message, and opening an object takes longer than selecting rows of it. Cached
objects are views of Ray's object store, so the cache takes no extra memory.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from dagrl.data.batch import Batch, Column, find_rows
from dagrl.ops.base import OpInput
from dagrl.ops.work import CacheKey, EngineWork, PartialRollout, PartWork


class ObjectTimeoutError(TimeoutError):
    """Objects do not arrive, because the process that holds them has died or cannot be reached."""


def get_objects(refs: Sequence[ray.ObjectRef], timeout_s: float, what: str) -> list[Any]:
    """The objects of `refs`, in order, fetched in parallel.

    Raises ObjectTimeoutError, which calls them `what`, after `timeout_s` or if the process that makes them has died.
    """
    try:
        return ray.get(list(refs), timeout=timeout_s) if refs else []
    except ray.exceptions.GetTimeoutError as error:
        raise ObjectTimeoutError(f"waited {timeout_s:g} s for {what}, out of Ray's object store") from error
    except ray.exceptions.RayActorError as error:
        raise ObjectTimeoutError(f"the process that was asked for {what} has died") from error


class ObjectCache:
    """The objects of one worker, by step. Thread-safe."""

    def __init__(self, timeout_s: float, *, keep: bool) -> None:
        """`timeout_s` bounds each wait. Without `keep` nothing is cached between calls."""
        self._timeout_s, self._keep = timeout_s, keep
        self._objects: dict[int, dict[CacheKey, Batch]] = {}
        """Step -> objects. The key of a fetched object is the id of its ref: if a worker keeps a ref after the call,
        Ray asks the owner about it."""
        self._lock = threading.Lock()

    def forget(self, committed: int) -> None:
        with self._lock:
            self._objects = {step: objects for step, objects in self._objects.items() if step > committed}

    def put(self, step: int, key: CacheKey, batch: Batch) -> None:
        with self._lock:
            self._objects.setdefault(step, {})[key] = batch

    def parts(self, step: int, parts: Sequence[PartWork]) -> list[OpInput]:
        """Fetch the columns of all parts and put the rows of each part in order. Raises ObjectTimeoutError."""
        with self._lock:
            objects = self._objects.setdefault(step, {}) if self._keep else {}
        refs = dict.fromkeys(ref for part in parts for source in part.sources for ref in source.refs)
        missing = [ref for ref in refs if not isinstance(ref, bytes) and ref.binary() not in objects]
        names = {name for part in parts for source in part.sources for name in source.columns.values()}
        fetched = get_objects(missing, self._timeout_s, f"{len(missing)} blocks of {', '.join(sorted(names))}")
        objects.update(zip((ref.binary() for ref in missing), fetched, strict=True))
        return [OpInput(part.index, _assemble(part, objects)) for part in parts]

    def partial_rollout(self, begun: PartialRollout, outputs: Mapping[str, str]) -> Batch:
        """Fetch the partial rollout of a group, with the op's names of its columns (`outputs`)."""
        block: Batch = get_objects([begun.ref], self._timeout_s, "the partial rollout of a prompt")[0]
        columns = {name: block[theirs] for name, theirs in outputs.items() if theirs in block}
        return Batch(block.rows, columns).in_order(begun.rows)


def _assemble(part: PartWork, objects: Mapping[CacheKey, Batch]) -> Batch:
    columns: dict[str, Column] = {}
    for source in part.sources:
        blocks = [objects[ref if isinstance(ref, bytes) else ref.binary()] for ref in source.refs]
        places = find_rows(part.rows, np.concatenate([block.rows for block in blocks]))
        for mine, theirs in source.columns.items():
            columns[mine] = Column.gather([block[theirs] for block in blocks], places)
    return Batch(part.rows, columns)


class CacheView:
    """The driver's view of one worker's cache. The worker must process calls in the order in which they are sent."""

    def __init__(self) -> None:
        self._keys: dict[int, dict[ray.ObjectRef, CacheKey]] = {}
        """Step -> cached objects."""
        self._sent = 0

    def use_keys[Work: EngineWork](self, work: Work) -> Work:
        """The work to send: cached objects are named by key, and its output gets a new key."""
        self._keys = {step: keys for step, keys in self._keys.items() if step > work.committed}
        keys = self._keys.setdefault(work.step, {})

        def key_or_ref(ref: ray.ObjectRef | CacheKey) -> ray.ObjectRef | CacheKey:
            assert not isinstance(ref, bytes), "the work was passed to `use_keys` before"
            if ref in keys:
                return keys[ref]
            keys[ref] = ref.binary()
            return ref

        parts = tuple(
            replace(
                part,
                sources=tuple(replace(source, refs=tuple(map(key_or_ref, source.refs))) for source in part.sources),
            )
            for part in work.parts
        )
        self._sent += 1
        return replace(work, parts=parts, cache_as=b"made of work %d" % self._sent)

    def add_output(self, columns: ray.ObjectRef, work: EngineWork) -> None:
        """The worker will cache the output of `work`, which the driver knows as `columns`."""
        self._keys[work.step][columns] = work.cache_as
