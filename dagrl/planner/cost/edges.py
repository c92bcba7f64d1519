"""Bytes that go along the edges of a step's DAG: columns, by what their contract says of dtype and shape."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dagrl.backends.decoding import Lengths
from dagrl.backends.families.shape import ModelShape
from dagrl.graph.columns import CORE_COLUMNS, ColumnSpec, Shape
from dagrl.scheduler.plan import PlannedTask

_OFFSET_BYTES = 8
"""Of a ragged column, for each row: where its values begin."""
_TEXT_BYTES = 64
"""Of a text, such as a reference answer."""
_UNKNOWN_BYTES = 4
"""Of a user's own column: one float32 for each row."""


def edge_bytes(
    tasks: Mapping[str, PlannedTask], task: PlannedTask, rows: int, lengths: Lengths, shape: ModelShape
) -> dict[str, float]:
    """Task that `task` reads from -> bytes of a step that it takes from there."""
    found: dict[str, float] = {}
    for producer, column in dict.fromkeys(task.inputs.values()):
        # The column by the name that its op has for it: the contract's.
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
