"""Files of experience: one parquet file for each batch, with the columns that the other part of a pipeline reads.

Rows are in the order of their ids. Files also have a column ``prompt_id``, and the schema's metadata name the run that
wrote the file, and its model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dagrl.data.batch import Batch, Column
from dagrl.data.tables import columns_of, table_of, write_tables

_KEY = b"dagrl.experience"
_FORMAT = 1
_PROMPT_ID = "prompt_id"


@dataclass(frozen=True, slots=True)
class Origin:
    """The writer of a file of experience."""

    model: str
    tokenizer: str
    explorer: str
    step: int
    group_size: int
    """Ids of the rows of a group: ``group * group_size`` and those after it."""
    format: int = _FORMAT


@dataclass(frozen=True, slots=True)
class Experience:
    """A batch of experience."""

    batch: Batch
    """Rows with their original ids, in ascending order."""
    prompt_ids: np.ndarray
    """Id of the prompt of each row, int64 [rows]."""


def write_experience(path: Path, experience: Experience, origin: Origin) -> None:
    """Write a file, and wait until it is on the disk. Raises OSError."""
    columns = {**experience.batch.columns, _PROMPT_ID: Column(experience.prompt_ids)}
    table = table_of(columns).replace_schema_metadata({_KEY: json.dumps(asdict(origin))})
    write_tables([table], path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read_experience(path: Path, names: Iterable[str]) -> Experience:
    """Read some columns of a file, including ``sample_id``. Raises ValueError if the file is damaged."""
    try:
        table = pq.read_table(path, columns=[*dict.fromkeys(("sample_id", *names)), _PROMPT_ID])
        columns = columns_of(table)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}; copy it again") from error
    prompt_ids = columns.pop(_PROMPT_ID).values
    return Experience(Batch(columns["sample_id"].values, columns), prompt_ids)


def origin_of(path: Path) -> tuple[Origin, frozenset[str]]:
    """The writer of a file, and its columns. Raises ValueError if it is not a file of experience."""
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}; copy it again") from error
    fields = json.loads((schema.metadata or {}).get(_KEY, b"null"))
    if not isinstance(fields, Mapping):
        raise ValueError(f"{path} is no file of experience: `dagrl run --only` has not written it; move it away")
    if fields.get("format") != _FORMAT:
        raise ValueError(f"{path} has format {fields.get('format')}, and this dagrl reads format {_FORMAT}")
    return Origin(**fields), frozenset(schema.names)
