"""Reads the header of a safetensors file: names, dtypes and shapes, without torch and without the weights.

The format: 8 bytes with the header's length, the header as JSON, then the tensors one behind the other without gaps. A
file is refused by the same rules as by the safetensors library.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import TypeIs

FLOATING = ("F64", "F32", "F16", "BF16")
"""Dtypes that weights can be trained from."""

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000
"""Bytes; the library's own limit."""
_POINTER_BYTES = 1024
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}

LFS = " (where git-lfs is missing, git leaves a line of text in its place)"


class HeaderEntry(NamedTuple):
    """A tensor as the header describes it."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, HeaderEntry]:
    """The tensors of a file by name. ValueError with what is wrong with the file, to follow its name in a sentence."""
    size = path.stat().st_size
    if size == 0:
        raise ValueError("is empty")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or _LENGTH_BYTES + length > size or length > _LONGEST_HEADER:
            raise ValueError(_no_safetensors(size))
        text = file.read(length)
    header = _parsed(text)
    if header is None:
        raise ValueError(_no_safetensors(size))
    header.pop("__metadata__", None)
    end, entries = 0, dict[str, HeaderEntry]()
    for name, begins, ends, entry in sorted(_read(header), key=lambda each: each[1:3]):
        if begins != end:
            raise ValueError(f"is broken: tensor {name!r} begins at byte {begins}, and the one before it ends at {end}")
        end, entries[name] = ends, entry
    stored = size - _LENGTH_BYTES - length
    if stored != end:
        what = "was cut short" if stored < end else "is too long"
        raise ValueError(f"{what}: its header describes {end} bytes of tensors, and the file holds {stored}")
    return entries


def _parsed(text: bytes) -> dict[str, Any] | None:
    """The header; None where it is no JSON object of that form."""
    try:
        header = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict):
        return None
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict):
        return header if all(isinstance(value, str) for value in metadata.values()) else None
    return header if metadata is None else None


def _read(header: dict[str, Any]) -> list[tuple[str, int, int, HeaderEntry]]:
    """Each tensor's name, where it begins and ends, and what else is known of it."""
    found = []
    for name, entry in header.items():
        fields = entry if isinstance(entry, dict) else {}
        dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
        if not (isinstance(dtype, str) and _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
            raise ValueError(f"is broken: its header gives tensor {name!r} no dtype, shape and data_offsets")
        if dtype not in _BITS:
            raise ValueError(f"is broken: tensor {name!r} has the dtype {dtype!r}, which safetensors does not know")
        begins, ends = offsets
        bits = math.prod(shape) * _BITS[dtype]
        if bits != (ends - begins) * 8:
            takes = f"takes {bits // 8} bytes, and its data_offsets {offsets} give it {ends - begins}"
            raise ValueError(f"is broken: tensor {name!r}, {shape} of {dtype}, {takes}")
        found.append((name, begins, ends, HeaderEntry(dtype, tuple(shape))))
    return found


def _are_counts(value: Any) -> TypeIs[list[int]]:
    return isinstance(value, list) and set(map(type, value)) <= {int} and min(value, default=0) >= 0


def _no_safetensors(size: int) -> str:
    return f"is no safetensors file{LFS if size < _POINTER_BYTES else ', or a torn one'}"
