"""Writes prompts to a parquet file in verl's schema, for data_preprocess/; `dagrl.data.prompts` reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_PER_GROUP = 8192

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt with its reference answer and source."""

    data_source: str
    prompt: str | Sequence[Message]
    """The user's message, or a whole chat."""
    answer: str
    """Reference answer (``reward_model.ground_truth``)."""
    extra_info: Mapping[str, Any]
    """Further data for rewards, with the same keys in every row."""
    ability: str = "math"
    """Kind of task, verl's term."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns, such as images, the same in every row."""

    @property
    def messages(self) -> Sequence[Message]:
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt


def write_prompts(
    path: Path,
    rows: Iterable[PromptRow],
    extra_info: Mapping[str, pa.DataType],
    columns: Mapping[str, pa.DataType] | None = None,
    *,
    rows_per_group: int = _ROWS_PER_GROUP,
) -> int:
    """Write `rows` to `path` and return their number.

    `extra_info` has the types of that column's keys, `columns` those of further columns. At most `rows_per_group` rows
    are held in memory. The file is replaced only when it is complete; if `rows` raises, the old one stays.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        {
            "data_source": pa.string(),
            "prompt": pa.list_(pa.struct({"content": pa.string(), "role": pa.string()})),
            "ability": pa.string(),
            "reward_model": pa.struct({"ground_truth": pa.string(), "style": pa.string()}),
            "extra_info": pa.struct(dict(extra_info)),
            **(columns or {}),
        }
    )
    written = 0
    with replacing(path) as aside, pq.ParquetWriter(aside, schema) as writer:
        for group in batched(rows, rows_per_group):
            writer.write_table(pa.Table.from_pylist([_record(row) for row in group], schema))
            written += len(group)
    return written


def _record(row: PromptRow) -> dict[str, object]:
    return {
        "data_source": row.data_source,
        "prompt": [dict(message) for message in row.messages],
        "ability": row.ability,
        "reward_model": {"style": "rule", "ground_truth": row.answer},
        "extra_info": dict(row.extra_info),
        **row.columns,
    }


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which replaces it at the end and is removed on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.unfinished")
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
