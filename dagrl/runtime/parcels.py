"""Messages on their way between driver and workers: pickled once, with the object refs beside them.

Ray takes bytes and refs as they are. Left to itself it would look into every message in Python, and know its size
alone.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import ray

type Parcel = tuple[bytes, list[ray.ObjectRef]]
"""A message, and the refs that it names by their places in the list."""


def pack(message: Any) -> Parcel:
    """Make a parcel of a message; a ref that is in it several times goes along once."""
    buffer, refs = io.BytesIO(), _Refs()
    pickler = _Packer(buffer, protocol=5)
    pickler.refs = refs
    pickler.dump(message)
    return buffer.getvalue(), list(refs)


def unpack(data: bytes, refs: Sequence[ray.ObjectRef]) -> Any:
    """The message in a parcel of our own processes."""
    unpacker = _Unpacker(io.BytesIO(data))
    unpacker.refs = refs
    return unpacker.load()


def parcel_bytes(data: bytes, refs: Sequence[ray.ObjectRef]) -> int:
    """What a parcel weighs, object refs counted as their ids."""
    return len(data) + sum(len(ref.binary()) for ref in refs)


class _Refs(dict[ray.ObjectRef, int]):
    """Ref -> its place."""

    def __missing__(self, ref: ray.ObjectRef) -> int:
        self[ref] = len(self)
        return self[ref]


class _Packer(pickle.Pickler):
    refs: _Refs

    def persistent_id(self, thing: Any) -> int | None:
        return self.refs[thing] if isinstance(thing, ray.ObjectRef) else None


class _Unpacker(pickle.Unpickler):
    refs: Sequence[ray.ObjectRef]

    def persistent_load(self, place: int) -> ray.ObjectRef:
        return self.refs[place]
