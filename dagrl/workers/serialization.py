"""Serialization of messages: pickled once for all ranks, with object refs beside the bytes.

Ray passes bytes and refs through as they are. It would serialize each message for each rank, in Python. A batch in a
message leaves its worker as a separate object, and the receiver finds the ref in its place.

The sender may run in another environment: the first byte of a message is the version of the protocol, and messages
contain classes of dagrl, its backends, numpy and Python only.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import ray

from dagrl.config.schema.backends import backend_packages
from dagrl.data.batch import Batch
from dagrl.protocol import PROTOCOL, check_protocol

type Serialized = tuple[bytes, list[ray.ObjectRef]]
"""A message, and the refs that it names by their index in the list."""


def serialize(message: object) -> tuple[bytes, list[Any]]:
    """The message as bytes, and the distinct refs and batches in it."""
    buffer = io.BytesIO(bytes([PROTOCOL]))
    buffer.seek(1)
    pickler = _Pickler(buffer, protocol=5)
    pickler.dump(message)
    return buffer.getvalue(), pickler.objects


def deserialize(data: bytes, refs: Sequence[ray.ObjectRef]) -> Any:
    """The message. Only for messages of our own processes. Raises ValueError if they run another version of dagrl."""
    check_protocol(data[0])
    buffer = io.BytesIO(data)
    buffer.seek(1)
    unpickler = _Unpickler(buffer)
    unpickler.refs = refs
    return unpickler.load()


def message_bytes(data: bytes, refs: Sequence[ray.ObjectRef]) -> int:
    """Size of a serialized message. A ref counts as its id."""
    return len(data) + sum(len(ref.binary()) for ref in refs)


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, protocol: int) -> None:
        super().__init__(buffer, protocol)
        self.objects: list[object] = []
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

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in _packages():
            raise pickle.UnpicklingError(f"a message names {module}.{name}, which other environments may lack")
        return super().find_class(module, name)


@cache
def _packages() -> frozenset[str]:
    """Packages whose classes and functions messages may name: Python's, dagrl's, and those of its backends."""
    backends = {package.partition(".")[0] for package in backend_packages().values()}
    return sys.stdlib_module_names | backends | {"dagrl", "numpy", "ray"}
