"""The files of a replay buffer: ``buffer/NODE/step_N.parquet``, a row group for each group, and ``index_N.parquet``.

A step's index is the state of the buffer after it, and is written last. What a step does follows from the index of the
step before alone, so that a run goes on from any checkpoint as if it had not stopped. Files are renamed into place, and
go once neither this run nor a checkpoint can need them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dagrl.data.batch import Column
from dagrl.data.replay.choice import Entry
from dagrl.data.tables import columns_of, table_of, write_tables

_ORIGIN = b"dagrl.buffer"
_SPARSE = 0.5
"""Files in which a smaller fraction of groups is left are written again with these alone."""
_FIELDS = {"prompt": pa.string(), **dict.fromkeys(("mean", "spread", "right"), pa.float64())}
_SCHEMA = pa.schema([(name, _FIELDS.get(name, pa.int64())) for name in Entry._fields])


class BufferFiles:
    """The files of one buffer."""

    def __init__(self, folder: Path, origin: Mapping[str, str]) -> None:
        """`origin`: what rows of the buffer have to have in common, such as ``tokenizer`` -> a hash."""
        self._folder, self._origin = folder, dict(origin)

    def entries(self, step: int) -> list[Entry]:
        """The groups in the buffer after `step`; none before the first one.

        Raises ValueError if the index is missing or damaged, or of another origin.
        """
        path = self._index(step)
        if step < 1 or not (path.exists() or self._steps("index") or self._steps("step")):
            return []
        try:
            table = pq.read_table(path)
            entries = [Entry(**row) for row in table.select(Entry._fields).to_pylist()]
            origin = json.loads((table.schema.metadata or {}).get(_ORIGIN, b"{}"))
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise self._damaged(path, error) from error
        for what, value in self._origin.items():
            if origin.get(what) != value:
                raise ValueError(
                    f"the buffer {self._folder} is of another {what} than the run's; remove it to begin with an empty "
                    "one, or use another run folder"
                )
        return entries

    def read(self, entries: Sequence[Entry], columns: Collection[str]) -> list[dict[str, Column]]:
        """The columns of groups. Raises ValueError if a file is missing or damaged, or lacks a column."""
        files: dict[int, pq.ParquetFile] = {}
        return [self._group(entry, columns, files) for entry in entries]

    def write(self, step: int, groups: Sequence[tuple[Entry, Mapping[str, Column]]], entries: Iterable[Entry]) -> None:
        """Write new groups of `step`, and the index of all groups after it. Raises OSError.

        Groups of `entries` in files that are mostly empty move to the new file.
        """
        entries = list(entries)
        left: dict[int, int] = {}
        for entry in entries:
            left[entry.file] = left.get(entry.file, 0) + 1
        moving = [entry for entry in entries if entry.file != step and left[entry.file] < _SPARSE * entry.in_file]
        left_over = {(entry.step, entry.group) for entry in entries}
        stay = [(entry, columns) for entry, columns in groups if (entry.step, entry.group) in left_over]
        files: dict[int, pq.ParquetFile] = {}
        # All groups of a file have the same columns.
        names = [*stay[0][1]] if stay else None
        stored = [*stay, *((entry, self._group(entry, names, files)) for entry in moving)]
        if stored:
            write_tables([table_of(columns) for _, columns in stored], self._rows(step))
        places = {(entry.step, entry.group): place for place, (entry, _) in enumerate(stored)}
        indexed = [
            entry._replace(file=step, place=place, in_file=len(stored))
            if (place := places.get((entry.step, entry.group))) is not None
            else entry
            for entry in entries
        ]
        table = pa.Table.from_pylist([entry._asdict() for entry in indexed], _SCHEMA)
        table = table.replace_schema_metadata({_ORIGIN: json.dumps(self._origin)})
        write_tables([table], self._index(step))

    def sweep(self, needed: Collection[int], step: int) -> None:
        """Remove indices before `step` but those of the `needed` steps, and files that no index names."""
        for old in self._steps("index"):
            if old < step and old not in needed:
                self._index(old).unlink(missing_ok=True)
        try:
            named = {file for left in self._steps("index") for file in _files_in(self._index(left))}
        except (OSError, pa.ArrowException):
            return  # A later step reads the damaged index, or none does.
        for file in self._steps("step"):
            if file <= step and file not in named:
                self._rows(file).unlink(missing_ok=True)

    def _group(
        self, entry: Entry, columns: Collection[str] | None, files: dict[int, pq.ParquetFile]
    ) -> dict[str, Column]:
        path = self._rows(entry.file)
        try:
            if entry.file not in files:
                files[entry.file] = pq.ParquetFile(path)
            missing = [name for name in columns or () if name not in files[entry.file].schema_arrow.names]
            if not missing:
                return columns_of(
                    files[entry.file].read_row_group(entry.place, None if columns is None else [*columns])
                )
        except (OSError, pa.ArrowException, ValueError) as error:
            raise self._damaged(path, error) from error
        raise ValueError(
            f"the groups in {path} lack the column `{missing[0]}`, which a node reads now; remove {self._folder} to "
            "begin with an empty buffer"
        )

    def _damaged(self, path: Path, error: object) -> ValueError:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
        return ValueError(f"{path} {what}; remove {self._folder} to begin with an empty buffer")

    def _steps(self, kind: str) -> list[int]:
        names = [path.stem.rpartition("_")[2] for path in self._folder.glob(f"{kind}_*.parquet")]
        return sorted(int(name) for name in names if name.isdecimal())

    def _index(self, step: int) -> Path:
        return self._folder / f"index_{step}.parquet"

    def _rows(self, step: int) -> Path:
        return self._folder / f"step_{step}.parquet"


def _files_in(index: Path) -> set[int]:
    return set(pq.read_table(index, columns=["file"])["file"].to_pylist())
