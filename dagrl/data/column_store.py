"""Columns in files that are named by the hash of their content: equal columns are stored once.

A file is a numpy archive (``.npz``) of plain arrays, written aside and renamed: a kill leaves no partial file under its
name. Damage by a full disk or a copy is detected on reading, because the content no longer matches the name.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from dagrl.data.batch import Batch, Column

_PARTS = ("values", "offsets", "index")


class DamagedColumnError(ValueError):
    """A stored column is missing or damaged."""


class StoredBlock(BaseModel):
    """Rows with some of their columns, by the names of their files."""

    model_config = ConfigDict(frozen=True)

    rows: str
    columns: dict[str, str]


class ColumnStore:
    """The columns in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, column: Column) -> str:
        """Store a column, unless it is stored; returns its name. Raises OSError, ValueError for Python objects."""
        name = content_hash(column)
        path = self._path(name)
        if path.exists():
            return name
        self._folder.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{name}.{os.getpid()}")
        try:
            with aside.open("wb") as file:
                np.savez(file, allow_pickle=False, **_arrays(column))
            aside.replace(path)
        except OSError:
            with suppress(OSError):
                aside.unlink()
            raise
        return name

    def get(self, name: str) -> Column:
        """The column of that name. Raises DamagedColumnError."""
        path = self._path(name)
        try:
            with np.load(path, allow_pickle=False) as archive:
                offsets, index = (archive.get(part) for part in _PARTS[1:])
                column = Column(archive["values"], offsets, index)
        except FileNotFoundError:
            raise DamagedColumnError(f"{path} is missing") from None
        except (OSError, ValueError, KeyError, EOFError, AssertionError, zipfile.BadZipFile) as error:
            raise DamagedColumnError(f"{path} cannot be read: {error or 'its content has changed'}") from error
        if content_hash(column) != name:
            raise DamagedColumnError(f"{path} holds something else than was written")
        return column

    def put_block(self, batch: Batch, names: Iterable[str]) -> StoredBlock:
        columns = {name: self.put(batch[name]) for name in names if name in batch}
        return StoredBlock(rows=self.put(Column(batch.rows)), columns=columns)

    def get_block(self, block: StoredBlock) -> Batch:
        """The rows and columns of a block. Raises DamagedColumnError."""
        columns = {name: self.get(stored) for name, stored in block.columns.items()}
        return Batch(self.get(block.rows).values, columns)

    def sweep(self, needed: set[str]) -> None:
        """Remove all other columns, and leftovers of interrupted writes."""
        for path in self._folder.glob("*"):
            if path.stem not in needed:
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npz"


def content_hash(column: Column) -> str:
    """The name of a column: equal for equal values, types and shapes. ValueError for Python objects."""
    digest = hashlib.blake2b(digest_size=16)
    for part, array in _arrays(column).items():
        if array.dtype.hasobject:
            raise ValueError("a column of Python objects cannot be stored; write numbers, or text as UTF-8")
        digest.update(f"{part} {array.dtype.str} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _arrays(column: Column) -> dict[str, np.ndarray]:
    arrays = {part: getattr(column, part) for part in _PARTS}
    return {part: array for part, array in arrays.items() if array is not None}
