"""Writing prompts to a parquet file in verl's schema: what data_preprocess/ makes and `dagrl.data.prompts` reads."""

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
"""One message of a chat: its ``role`` and its ``content``."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt: what is asked, how its answer is judged, and where it comes from."""

    data_source: str
    """Name of the data set."""
    prompt: str | Sequence[Message]
    """What the user says, or a whole chat."""
    answer: str
    """Reference answer (``reward_model.ground_truth``)."""
    extra_info: Mapping[str, Any]
    """Whatever else a reward may want to know; the same keys in every row."""
    ability: str = "math"
    """Kind of task, in verl's words."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns, such as the images of a question; the same ones in every row."""


def write_prompts(
    path: Path,
    rows: Iterable[PromptRow],
    extra_info: Mapping[str, pa.DataType],
    columns: Mapping[str, pa.DataType] | None = None,
    *,
    rows_per_group: int = _ROWS_PER_GROUP,
) -> int:
    """Write `rows` as they come to `path` and return how many there were.

    `extra_info` types the keys of that column, `columns` the further columns of the rows. `rows_per_group` rows are
    held in memory at a time. The file appears at `path` when it is whole; where `rows` raises, whatever was there
    before stays.
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
    with _replacing(path) as aside, pq.ParquetWriter(aside, schema) as writer:
        for group in batched(rows, rows_per_group):
            writer.write_table(pa.Table.from_pylist([_record(row) for row in group], schema))
            written += len(group)
    return written


def _record(row: PromptRow) -> dict[str, Any]:
    chat = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    return {
        "data_source": row.data_source,
        "prompt": [dict(message) for message in chat],
        "ability": row.ability,
        "reward_model": {"style": "rule", "ground_truth": row.answer},
        "extra_info": dict(row.extra_info),
        **row.columns,
    }


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A place beside `path` to write to, moved to `path` at the end, and removed when the writing fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.unfinished")
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
