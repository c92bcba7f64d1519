"""Files of all formats with the same rows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with copies of files, empty for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dagrl" / "prompts"


def _parquet(path: Path, rows: Rows) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)


def _stream(path: Path, rows: Rows) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def _arrow(path: Path, rows: Rows) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def _lines(rows: Rows) -> bytes:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


WRITERS: dict[str, Callable[[Path, Rows], Any]] = {
    "a.parquet": _parquet,
    "a.arrow": _arrow,
    "stream.arrow": _stream,
    "a.jsonl": lambda path, rows: path.write_bytes(_lines(rows)),
    "bom.jsonl": lambda path, rows: path.write_bytes(b"\xef\xbb\xbf" + _lines(rows).replace(b"\n", b"\r\n\r\n")),
    "a.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(_lines(rows))),
    "unended.json": lambda path, rows: path.write_bytes(_lines(rows).rstrip()),
    "list.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "pretty.json": lambda path, rows: path.write_text(json.dumps(rows, indent=2)),
    "list.json.gz": lambda path, rows: path.write_bytes(gzip.compress(json.dumps(rows).encode())),
}


@pytest.fixture(params=WRITERS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Rows], Path]]:
    """Write rows to a file of each format."""

    def write(rows: Rows, name: str = "") -> Path:
        path = tmp_path / (name + request.param)
        WRITERS[request.param](path, rows)
        return path

    yield write
