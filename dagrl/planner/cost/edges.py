"""Bytes on the edges of a step's DAG, from the dtypes and shapes of its columns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dagrl.backends.decoding import Lengths
from dagrl.backends.families.shape import ModelShape
from dagrl.graph.columns import CORE_COLUMNS, ColumnSpec, Shape
from dagrl.scheduler.plan import PlannedTask

_OFFSET_BYTES = 8
"""The offset of each row of a ragged column."""
_TEXT_BYTES = 64
"""A text, such as a reference answer."""
_UNKNOWN_BYTES = 4
"""A user's own column: one float32 for each row."""


def edge_bytes(
    tasks: Mapping[str, PlannedTask], task: PlannedTask, rows: int, lengths: Lengths, shape: ModelShape
) -> dict[str, float]:
    """Return each task that `task` reads from -> bytes of a step."""
    found: dict[str, float] = {}
    for producer, column in dict.fromkeys(task.inputs.values()):
        # Contracts have the op's name of a column.
        names = {there: own for own, there in tasks[producer].outputs.items()}
        each = _row_bytes(CORE_COLUMNS.get(names.get(column, column)), lengths, shape)
        found[producer] = found.get(producer, 0.0) + rows * each
    return found


def _row_bytes(column: ColumnSpec | None, lengths: Lengths, shape: ModelShape) -> float:
    if column is None:
        return _UNKNOWN_BYTES
    each = np.dtype(column.dtype).itemsize
    match column.shape:
        case Shape.SAMPLE:
            return each
        case Shape.PROMPT:
            return each * lengths.prompt + _OFFSET_BYTES
        case Shape.RESPONSE:
            return each * lengths.response + _OFFSET_BYTES
        case Shape.TEXT:
            return _TEXT_BYTES + _OFFSET_BYTES
        case Shape.ROUTES:
            chosen = shape.experts.chosen if shape.experts else 0
            return each * (lengths.row - 1) * shape.layers * chosen + _OFFSET_BYTES
    raise AssertionError(f"no size of a {column.shape} column")
