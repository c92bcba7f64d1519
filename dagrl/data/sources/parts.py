"""Files of a source, read a group of rows at a time: parquet, Arrow, and JSON that is copied to parquet once."""

from __future__ import annotations

import glob
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.config.loading.prompt_files import PromptFile, arrow_batches, is_list_of_rows, json_rows, unreadable
from dagrl.model_files.nested_columns import column_type

if TYPE_CHECKING:
    import pyarrow as pa

_GROUP_ROWS, _GROUP_BYTES = 4096, 8 << 20
"""Rows of the largest groups in copies."""
_LARGE_GROUP, _LARGE_FILE = 32 << 20, 256 << 20
"""Bytes in memory. Larger groups are copied into smaller ones, because single rows are read."""
_SAMPLED_ROWS = 256
_ROW, _TEXT = "row", "json"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""A surrogate, escaped or encoded; pairs of escaped ones are fine."""


type Values = dict[str, list[Any]]
"""Columns as Python objects."""


class Part(ABC):
    """The rows of a file, in groups that are read as a whole."""

    schema: pa.Schema
    """Columns and types; for JSON, the types of its first rows."""
    groups: np.ndarray
    """Rows of each group, int64."""
    size: int
    """Approximate bytes of all groups in memory; 0 if they stay on disk."""
    title: Path
    """The file, for messages."""
    folder: Path
    """The folder of relative paths of images."""

    @abstractmethod
    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Columns of a group, and fields of structs, that exist in the file."""

    def values(self, table: pa.Table, names: Sequence[str]) -> Values:
        """Whole columns of a table from `read`, as Python objects; None if the file lacks one."""
        return python_values(table, names)

    def place(self, row: int) -> str:
        """Location of a row, for messages."""
        return f"{self.title}, row {row} (the first is 0)"


class ParquetPart(Part):
    """A parquet file, or the copy of one."""

    def __init__(self, file: PromptFile, opened: object = None) -> None:
        """`opened`: the open file, if it is read over the network."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.title, self.folder = file.path, file.path.parent
        with reading(file):
            # Not mapped into memory: rewriting the file during the run would end the process with SIGBUS.
            self._file = pq.ParquetFile(opened or file.path)
            metadata = self._file.metadata
            sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
            if opened is None and sum(sizes) > _LARGE_FILE and max(sizes) > _LARGE_GROUP:
                schema = self._file.schema_arrow
                most = max(1, min(_GROUP_ROWS, _GROUP_BYTES * metadata.num_rows // sum(sizes)))
                batches = self._file.iter_batches(batch_size=most)
                tables = (pa.Table.from_batches([batch], schema) for batch in batches)
                self._file = pq.ParquetFile(copied(file, schema, tables))
            self.schema: pa.Schema = self._file.schema_arrow
        metadata = self._file.metadata
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self.groups, self.size = np.array(rows, dtype=np.int64), sum(sizes)

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        import pyarrow as pa

        known = [column for column in columns if column_type(self.schema, column) is not None]
        try:
            return self._file.read_row_group(group, known)
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{self.title} cannot be read as parquet: {error}") from error


class RemotePart(ParquetPart):
    """A parquet file that is read over the network."""

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        import httpx

        try:
            return super().read(group, columns)
        except httpx.HTTPError as error:  # most of them are no OSError
            message = f"{self.title} cannot be read over the network: {error}"
            raise ValueError(f"{message}; check the network, or set `streamed: false`") from error


class ArrowPart(Part):
    """An Arrow file, which stays on disk."""

    def __init__(self, file: PromptFile) -> None:
        import pyarrow as pa

        self.title, self.folder = file.path, file.path.parent
        with reading(file):
            self._batches = list(arrow_batches(file.path))
        self.schema: pa.Schema = self._batches[0].schema if self._batches else pa.schema([])
        self.groups, self.size = np.array([batch.num_rows for batch in self._batches], dtype=np.int64), 0

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        import pyarrow as pa

        names = dict.fromkeys(column.partition(".")[0] for column in columns)
        known = [name for name in names if name in self.schema.names]
        return pa.Table.from_batches([self._batches[group]]).select(known)


class JsonPart(Part):
    """A file of JSON rows. They are copied to parquet as texts, because the rows may have different fields."""

    def __init__(self, file: PromptFile) -> None:
        self.title, self.folder = file.path, file.path.parent
        copy = file.cached
        if not copy.is_file():
            copy = copied(file, _schema_of_texts(), _tables_of_texts(file.path))
        self._texts = ParquetPart(PromptFile(copy, "parquet"))
        self._in_list = is_list_of_rows(file.path)
        self._ends = np.cumsum(self._texts.groups)
        self._numbers: dict[int, np.ndarray] = {}
        """The last group whose rows were located -> their lines."""
        self.groups, self.size = self._texts.groups, self._texts.size
        first = self.read(0, []).slice(0, _SAMPLED_ROWS) if len(self.groups) else None
        self.schema = schema_of_rows(self._rows(first) if first is not None else [])

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        return self._texts.read(group, [_ROW, _TEXT])

    def values(self, table: pa.Table, names: Sequence[str]) -> Values:
        rows = self._rows(table)
        return {name: [row.get(name) for row in rows] for name in names}

    def place(self, row: int) -> str:
        group = int(np.searchsorted(self._ends, row, side="right"))
        first = int(self._ends[group - 1]) if group else 0
        if group not in self._numbers:
            self._numbers = {group: self._texts.read(group, [_ROW])[_ROW].to_numpy()}
        return self._at(int(self._numbers[group][row - first]))

    def _at(self, number: int) -> str:
        return super().place(number) if self._in_list else f"{self.title}:{number}"

    def _rows(self, table: pa.Table) -> list[dict[str, Any]]:
        rows = []
        for number, text in zip(table[_ROW].to_pylist(), table[_TEXT].to_pylist(), strict=True):
            rows.append(row_of_json(text, self._at(number)))
        return rows


def part_of(file: PromptFile) -> Part:
    """Open a file. Raises ValueError if it is damaged; OSError if it cannot be read."""
    kinds: dict[str, type[ParquetPart] | type[ArrowPart] | type[JsonPart]]
    kinds = {"parquet": ParquetPart, "arrow": ArrowPart, "json": JsonPart}
    return kinds[file.kind](file)


def row_of_json(text: bytes, place: str) -> dict[str, object]:
    """A row of JSON as Python objects. Raises ValueError, with its place, if it is invalid."""
    try:
        row = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"half of a surrogate pair, {error.object[error.start]!a}"
        raise ValueError(f"{place}: a text has {half}, which no tokenizer takes; mend the row, or remove it") from error
    except (ValueError, RecursionError) as error:
        what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"{place}: no row of JSON ({what}); mend the row, or remove it") from error
    if not isinstance(row, dict):
        raise ValueError(
            f"{place}: no object with fields, but {text[:60].decode(errors='replace')}; mend the row, or remove it"
        )
    return row


def schema_of_rows(rows: Sequence[dict[str, object]]) -> pa.Schema:
    """The columns of rows of JSON; columns with values of several types are text.

    Arrow's own inference takes a second, to import pandas.
    """
    import pyarrow as pa

    return pa.schema(list(_fields(rows)))


def _fields(rows: Sequence[dict[str, Any]]) -> Iterator[pa.Field]:
    import pyarrow as pa

    for name in dict.fromkeys(name for row in rows for name in row):
        yield pa.field(name, _kind([row[name] for row in rows if name in row]))


def _kind(values: Sequence[Any]) -> pa.DataType:
    import pyarrow as pa

    there = [value for value in values if value is not None]
    kinds = {type(value) for value in there}
    if kinds == {dict}:
        return pa.struct(list(_fields(there)))
    if kinds == {list}:
        return pa.list_(_kind([item for value in there for item in value]))
    if kinds == {int, float}:
        return pa.float64()
    simple = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    return pa.null() if not kinds else simple.get(kinds.pop(), pa.string()) if len(kinds) == 1 else pa.string()


def python_values(table: pa.Table, names: Sequence[str]) -> dict[str, list[object]]:
    """Columns as Python objects; None if the table lacks one."""
    # Maps need another, slower, conversion.
    return {
        name: table[name].to_pylist(maps_as_pydicts="lossy" if "map<" in str(table[name].type) else None)
        if name in table.column_names
        else [None] * table.num_rows
        for name in names
    }


def copied(file: PromptFile, schema: pa.Schema, tables: Iterable[pa.Table]) -> Path:
    """Write a copy of a file as parquet in small groups into the cache, unless it is there, and return its path."""
    import pyarrow.parquet as pq

    path = file.cached
    if path.is_file():
        return path
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(aside, schema, compression="zstd", compression_level=1) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=_GROUP_ROWS)
        aside.replace(path)
        for older in path.parent.glob(f"{glob.escape(file.cached_name)}-*.parquet"):
            if older != path:
                older.unlink(missing_ok=True)
    except OSError as error:
        message = (
            f"{path.parent} cannot take a copy of {file.path} ({error.strerror}); set XDG_CACHE_HOME to another folder"
        )
        raise ValueError(message) from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
    return path


@contextmanager
def reading(file: PromptFile) -> Iterator[None]:
    """Context that turns Arrow's errors about a damaged file into a ValueError with a sentence."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, PermissionError):
            raise
        raise ValueError(unreadable(file, error)) from error


def _schema_of_texts() -> pa.Schema:
    import pyarrow as pa

    return pa.schema({_ROW: pa.int64(), _TEXT: pa.large_binary()})


def _tables_of_texts(path: Path) -> Iterator[pa.Table]:
    import pyarrow as pa

    def table() -> pa.Table:
        return pa.table([pa.array(numbers, pa.int64()), pa.array(texts, pa.large_binary())], _schema_of_texts())

    numbers, texts, size = list[int](), list[bytes](), 0
    for number, text in json_rows(path):
        numbers.append(number)
        texts.append(text)
        size += len(text)
        if len(texts) >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield table()
            numbers, texts, size = [], [], 0
    if texts:
        yield table()
