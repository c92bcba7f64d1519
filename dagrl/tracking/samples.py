"""Reads rows of ``samples/step_N_val.parquet`` for trackers."""

from __future__ import annotations

from pathlib import Path

from dagrl.tracking.base import SampleTable

_COLUMNS = ("data_set", "data_source", "prompt", "demonstration", "response", "answer", "reward")


def read_samples(path: Path, limit: int) -> SampleTable | None:
    """At most `limit` rows of a samples file, spread over its data sets and prompts; None if there is no file.

    The same rows in each validation. Raises OSError or ValueError if the file cannot be read.
    """
    import pyarrow.parquet as pq

    if not limit or not path.is_file():
        return None
    with pq.ParquetFile(path) as file:
        columns = [name for name in _COLUMNS if name in file.schema_arrow.names]
        rows = [tuple(row[name] for name in columns) for row in file.read(columns=columns).to_pylist()]
    by_set: dict[str, list[tuple]] = {}
    for row in rows:
        by_set.setdefault(row[0], []).append(row)
    counts: dict[str, int] = {}
    # Smallest sets first, so that others can use what they leave.
    for left, name in zip(range(len(by_set), 0, -1), sorted(by_set, key=lambda name: len(by_set[name])), strict=True):
        counts[name] = min(len(by_set[name]), (limit - sum(counts.values())) // left)
    chosen = [row for name, of_set in by_set.items() for row in _spread(of_set, counts[name])]
    return SampleTable(tuple(columns), tuple(chosen))


def _spread(rows: list[tuple], count: int) -> list[tuple]:
    """`count` of the rows, evenly spaced."""
    return [rows[place * len(rows) // count] for place in range(count)]
