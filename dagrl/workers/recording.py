"""A worker's part in records and replays: stores and loads columns, and computes digests of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.data.column_store import ColumnStore, StoredBlock
from dagrl.workers.object_cache import get_objects

if TYPE_CHECKING:
    import ray

    from dagrl.backends.base import TrainEngine
    from dagrl.weight_sync.protocol import WeightDigests

BUCKET_BYTES = 2**28
"""Weights that are looked at together."""


@dataclass(frozen=True, slots=True)
class ColumnsToStore:
    """An object of Ray's store, and which of its columns are recorded."""

    ref: ray.ObjectRef
    names: tuple[str, ...]


def store_columns(folder: Path, wanted: Sequence[ColumnsToStore], timeout_s: float) -> list[StoredBlock]:
    """Store the columns of objects in a folder. Raises OSError, ObjectTimeoutError."""
    store = ColumnStore(folder)
    # One after the other: together they may be larger than the memory.
    return [store.put_block(get_objects([each.ref], timeout_s, "columns to record")[0], each.names) for each in wanted]


def digests_of(engine: TrainEngine) -> WeightDigests:
    """The digests of an engine's weights, on rank 0. Collective."""
    # CPU workers do not import torch.
    from dagrl.weight_sync.digest import weight_digests

    return weight_digests(engine.export_weights(BUCKET_BYTES))
