"""A user's own function as an op: columns in as arrays or strings, columns out by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dagrl.data.batch import Batch, Column
from dagrl.nodes.base import Context, Op, Output, Part
from dagrl.spec.columns import CORE_COLUMNS, Shape
from dagrl.spec.custom import contract_of_function, load_function
from dagrl.spec.schema import CustomNode


def custom_op(place: str, folder: Path | None) -> Op:
    """The function at ``module:function`` as an op; ValueError where it cannot be loaded or returns no such columns."""
    function = load_function(place, folder)
    contract = contract_of_function(function, place)

    def run(parts: Sequence[Part], context: Context) -> Iterator[Output]:
        node = context.node
        assert isinstance(node, CustomNode)
        for part in parts:
            result = function(_view(part.batch), **node.args)
            if not isinstance(result, dict) or set(result) != set(contract.writes):
                raise ValueError(f"{place} must return a dict with the columns it writes: {', '.join(contract.writes)}")
            columns = {name: _column(name, values, len(part.batch), place) for name, values in result.items()}
            yield Output((part.index,), part.batch.rows, columns)

    return run


def _view(batch: Batch) -> dict[str, Any]:
    """Columns as a user wants them: an array where a row has one value, else a list with an array or string a row."""
    view: dict[str, Any] = {}
    for name, column in batch.columns.items():
        if column.offsets is None:
            view[name] = column.values
        elif column.values.dtype == np.uint8:
            view[name] = column.strings()
        else:
            view[name] = [column[row] for row in range(len(column))]
    return view


def _column(name: str, values: Any, rows: int, place: str) -> Column:
    known = CORE_COLUMNS.get(name)
    if len(values) != rows:
        raise ValueError(f"{place} returned {len(values)} values of {name!r} for {rows} rows")
    if isinstance(values[0], str) if rows else known is not None and known.shape is Shape.TEXT:
        return Column.text(list(values))
    dtype = known.dtype if known else "float32"
    ragged = known.shape is not Shape.SAMPLE if known else bool(rows) and np.ndim(values[0]) > 0
    return Column.ragged(list(values), dtype) if ragged else Column(np.asarray(values, dtype=dtype))
