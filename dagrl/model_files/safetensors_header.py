"""Read the header of a safetensors file: names, dtypes and shapes, without torch and without the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from dagrl.model_files.hf_config import lfs_hint

FLOATING = ("F64", "F32", "F16", "BF16")
"""Dtypes that weights can be trained from."""
_LENGTH_BYTES = 8


class HeaderEntry(NamedTuple):
    """A tensor in the header."""

    dtype: str
    shape: tuple[int, ...]


def read_bytes(path: Path) -> Callable[[str], bytes]:
    """A function that reads a tensor of a valid file, without conversion."""
    content = path.read_bytes()
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    header, start = json.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + length]), _LENGTH_BYTES + length

    def read(name: str) -> bytes:
        first, last = header[name]["data_offsets"]
        return content[start + first : start + last]

    return read


def read_header(path: Path) -> dict[str, HeaderEntry]:
    """Return the tensors of a file by name. ValueError with the file's fault, phrased to follow its name."""
    size = path.stat().st_size
    if size == 0:
        raise ValueError("is empty")
    try:
        with safe_open(path, framework="np"):
            pass  # It checks the header and the size of the file.
    except SafetensorError as error:
        if "incomplete metadata" in str(error):
            raise ValueError("was cut short, or is too long: its size does not match its header") from error
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise ValueError(f"is no safetensors file, or is broken{lfs_hint(path)}: {reason}") from error
    # Faster than a call of the library for each tensor.
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little")))
    header.pop("__metadata__", None)
    return {name: HeaderEntry(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
