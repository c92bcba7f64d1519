"""Messages on their way between driver and workers: pickled once, with objects beside them.

Ray takes bytes and refs as they are. Left to itself it would look into every message in Python, and know its size
alone. Columns become objects of their own wherever a message leaves their worker: they stand beside it, and whoever
gets it has refs in their places.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import ray

from dagrl.data.batch import Batch

type Parcel = tuple[bytes, list[ray.ObjectRef]]
"""A message, and the refs that it names by their places in the list."""


def pack(message: Any) -> tuple[bytes, list[Any]]:
    """A message, and the refs and batches that it names by their places in the list, each of them once."""
    buffer, beside = io.BytesIO(), _Beside()
    pickler = _Packer(buffer, protocol=5)
    pickler.beside = beside
    pickler.dump(message)
    return buffer.getvalue(), beside.things


def unpack(data: bytes, refs: Sequence[ray.ObjectRef]) -> Any:
    """The message in a parcel of our own processes."""
    unpacker = _Unpacker(io.BytesIO(data))
    unpacker.refs = refs
    return unpacker.load()


def parcel_bytes(data: bytes, refs: Sequence[ray.ObjectRef]) -> int:
    """What a parcel weighs, object refs counted as their ids."""
    return len(data) + sum(len(ref.binary()) for ref in refs)


class _Beside:
    """What stands beside a message."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._places: dict[Any, int] = {}
        """By ref, or by a batch's id."""

    def place(self, thing: Any) -> int:
        key = id(thing) if isinstance(thing, Batch) else thing
        if key not in self._places:
            self._places[key] = len(self.things)
            self.things.append(thing)
        return self._places[key]


class _Packer(pickle.Pickler):
    beside: _Beside

    def persistent_id(self, thing: Any) -> int | None:
        return self.beside.place(thing) if isinstance(thing, ray.ObjectRef | Batch) else None


class _Unpacker(pickle.Unpickler):
    refs: Sequence[ray.ObjectRef]

    def persistent_load(self, place: int) -> ray.ObjectRef:
        return self.refs[place]
