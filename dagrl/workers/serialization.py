"""Serialization of messages: pickled once for all ranks, with object refs beside the bytes.

Ray passes bytes and refs through as they are. It would serialize each message for each rank, in Python. A batch in a
message leaves its worker as a separate object, and the receiver finds the ref in its place.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import ray

from dagrl.data.batch import Batch

type Serialized = tuple[bytes, list[ray.ObjectRef]]
"""A message, and the refs that it names by their index in the list."""


def serialize(message: Any) -> tuple[bytes, list[Any]]:
    """The message as bytes, and the distinct refs and batches in it."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=5)
    pickler.dump(message)
    return buffer.getvalue(), pickler.objects


def deserialize(data: bytes, refs: Sequence[ray.ObjectRef]) -> Any:
    """The message. Only for messages of our own processes."""
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.refs = refs
    return unpickler.load()


def message_bytes(data: bytes, refs: Sequence[ray.ObjectRef]) -> int:
    """Size of a serialized message. A ref counts as its id."""
    return len(data) + sum(len(ref.binary()) for ref in refs)


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, protocol: int) -> None:
        super().__init__(buffer, protocol)
        self.objects: list[Any] = []
        self._indices: dict[Any, int] = {}
        """By ref, or by the id of a batch."""

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, ray.ObjectRef | Batch):
            return None
        key = id(thing) if isinstance(thing, Batch) else thing
        if key not in self._indices:
            self._indices[key] = len(self.objects)
            self.objects.append(thing)
        return self._indices[key]


class _Unpickler(pickle.Unpickler):
    refs: Sequence[ray.ObjectRef]

    def persistent_load(self, index: int) -> ray.ObjectRef:
        return self.refs[index]
