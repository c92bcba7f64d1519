"""The first rows of a prompt file, of any format, and its schema; nothing else of the file is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import batched, islice
from typing import TYPE_CHECKING, Any

from dagrl.config.loading.prompt_files import PromptFile, arrow_batches, is_list_of_rows, json_rows
from dagrl.data.sources.parts import python_values, row_of_json, schema_of_rows

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

type Row = dict[str, Any]

_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 1024
_INFERRED_ROWS = 256
_JSON_COST = 4
"""Time to read JSON, relative to the same number of bytes of Arrow."""


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Neighbouring rows."""

    numbers: Sequence[int]
    """Numbers of the rows, or lines from 1."""
    rows: list[Row]
    size: int
    """Bytes in memory, or the number that takes as long to read."""


class SampledFile:
    """An open file, whose first rows can be read."""

    in_lines = False
    """Whether rows are named by their lines."""

    def __init__(self, file: PromptFile, opened: pq.ParquetFile | None) -> None:
        import pyarrow as pa

        self.parquet = opened
        """The file, if it is parquet."""
        self.in_json = file.kind == "json"
        self._file = file
        self.schema: pa.Schema
        if opened is not None:
            self.schema = opened.schema_arrow
        elif file.kind == "arrow":
            first = next(arrow_batches(file.path), None)
            self.schema = pa.schema([]) if first is None else first.schema
        else:
            self.in_lines = not is_list_of_rows(file.path)
            self.schema = schema_of_rows([row for _, row, _ in islice(self._json(), _INFERRED_ROWS)])

    def batches(self, columns: Sequence[str]) -> Iterator[RowBatch]:
        """Yield the rows with these columns, and fields of structs. ArrowException if the file is damaged."""
        names, start = list(dict.fromkeys(column.partition(".")[0] for column in columns)), 0
        if self.in_json:
            for several in batched(self._json(), _BATCH_ROWS):
                rows = [{name: row.get(name) for name in names} for _, row, _ in several]
                size = _JSON_COST * sum(size for _, _, size in several)
                yield RowBatch([number for number, _, _ in several], rows, size)
            return
        for batch in self._arrow(columns, names):
            cells = python_values(batch, names)
            rows = [dict(zip(names, each, strict=True)) for each in zip(*cells.values(), strict=True)]
            yield RowBatch(range(start, start + len(rows)), rows, batch.nbytes)
            start += len(rows)

    def _json(self) -> Iterator[tuple[int, Row, int]]:
        path = self._file.path
        for number, text in json_rows(path):
            place = f"{path}:{number}" if self.in_lines else f"{path}, row {number} (the first is 0)"
            yield number, row_of_json(text, place), len(text)

    def _arrow(self, columns: Sequence[str], names: Sequence[str]) -> Iterator[pa.Table]:
        import pyarrow as pa

        if self.parquet is not None:
            for batch in self.parquet.iter_batches(
                batch_size=_batch_rows(self.parquet.metadata), columns=list(columns)
            ):
                yield pa.Table.from_batches([batch])
            return
        for batch in arrow_batches(self._file.path):
            table = pa.Table.from_batches([batch]).select(names)
            yield from (table.slice(start, _BATCH_ROWS) for start in range(0, len(table), _BATCH_ROWS))


@contextmanager
def sampled(file: PromptFile) -> Iterator[SampledFile]:
    """Open a file. OSError and ArrowException if it is damaged, ValueError for damaged JSON."""
    import pyarrow.parquet as pq

    if file.kind == "parquet":
        with pq.ParquetFile(file.path) as opened:
            yield SampledFile(file, opened)
    else:
        yield SampledFile(file, None)


def _batch_rows(metadata: pq.FileMetaData) -> int:
    """Rows of a batch of `_BATCH_BYTES` or less."""
    size = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * metadata.num_rows // max(size, 1)))
