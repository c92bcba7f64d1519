"""Sizes and checksums of the files in a folder, to detect damage."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_READ_WHOLE = 2**20
"""Files up to this size are read completely."""
_SAMPLES, _SAMPLE_BYTES = 256, 4096
"""Pieces that are read of larger files, evenly spread, both ends included: a second for a terabyte. What a power cut
or an incomplete copy leaves out is longer than the gaps."""

Table = Mapping[str, tuple[int, int]]
"""Relative path -> size in bytes and checksum."""


def fingerprints(folder: Path, besides: Iterable[str] = ()) -> Table:
    """The files in `folder`, without those with the names `besides` at its top level."""
    left_out = {folder / name for name in besides}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path not in left_out)
    return {str(path.relative_to(folder)): (path.stat().st_size, _checksum(path)) for path in files}


def damage(folder: Path, table: Table) -> str | None:
    """The fault of the first changed file of `folder`. None if all files are unchanged."""
    for name, (size, checksum) in table.items():
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if _checksum(path) != checksum:
                return f"{name} holds something else than was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def checksum_of(content: bytes) -> int:
    """Checksum of bytes, as for a small file."""
    return zlib.crc32(content)


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        for piece in _pieces(path.stat().st_size):
            file.seek(piece.start)
            checksum = zlib.crc32(file.read(len(piece)), checksum)
    return checksum


def _pieces(size: int) -> Iterator[range]:
    """The pieces to read of a file with `size` bytes."""
    if size <= _READ_WHOLE:
        yield range(size)
        return
    last = size - _SAMPLE_BYTES
    for sample in range(_SAMPLES):
        start = last * sample // (_SAMPLES - 1)
        yield range(start, start + _SAMPLE_BYTES)
