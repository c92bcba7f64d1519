"""A user's function as an op: columns in as arrays or strings, columns out by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dagrl.config.columns import CORE_COLUMNS, ColumnSpec, Shape
from dagrl.config.errors import counted
from dagrl.config.schema import CustomNode
from dagrl.data.batch import Column, view_of
from dagrl.ops.base import Context, Op, OpInput, Output
from dagrl.plugins.calls import call_or_stop
from dagrl.plugins.custom import load_function, located
from dagrl.plugins.declarations import declared


def custom_op(place: str, folder: Path | None) -> Op:
    """Wrap the function at ``module:function`` as an op. Raises ValueError if it cannot be loaded."""
    function = load_function(place, folder)
    contract = declared(function, place, "node")
    where = located(function, place)

    def run(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
        node = context.declared(CustomNode)
        for part in parts:
            result = call_or_stop(place, function, node.args, view_of(part.batch))
            if not isinstance(result, dict) or set(result) != set(contract.writes):
                raise ValueError(f"{where} must return a dict with the columns it writes: {', '.join(contract.writes)}")
            columns = {name: _column(name, values, len(part.batch), where) for name, values in result.items()}
            yield Output((part.index,), part.batch.rows, columns)

    return run


def _column(name: str, values: Any, rows: int, where: str) -> Column:
    try:
        # At most one item more than required, because an iterator may not end.
        listed = [*islice(values, rows + 1)]
    except TypeError as error:
        raise ValueError(
            f"{where} returned {values!r} as {name!r}; return a value for each of the {rows} rows"
        ) from error
    if len(listed) != rows:
        count = counted(len(listed), "value") if len(listed) < rows else "too many values"
        raise ValueError(f"{where} returned {count} of {name!r} for {counted(rows, 'row')}")
    known = CORE_COLUMNS.get(name) or ColumnSpec(name, "float32", _shape_of(listed), "the user's own")
    try:
        return _as_declared(known, listed)
    except (TypeError, ValueError, OverflowError) as error:
        what = "text" if known.shape is Shape.TEXT else f"{known.dtype} {known.shape.value}"
        raise ValueError(f"{where} returned values of {name!r} that are not {what}: {error}") from error


def _shape_of(values: list[Any]) -> Shape:
    if values and isinstance(values[0], str):
        return Shape.TEXT
    return Shape.RESPONSE if values and np.ndim(values[0]) else Shape.SAMPLE


def _as_declared(column: ColumnSpec, values: list[Any]) -> Column:
    """Raises TypeError, ValueError or OverflowError if the values do not have the column's dtype and shape."""
    if column.shape is Shape.TEXT:
        wrong = [value for value in values if not isinstance(value, str)]
        if wrong:
            raise TypeError(f"{wrong[0]!r} is not a string")
        return Column.text(values)
    ndim = column.shape.axes
    arrays = [_numbers(value, column.dtype) for value in values]
    wrong = [value for value, array in zip(values, arrays, strict=True) if array.ndim != ndim]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not a {'list' if ndim else 'number'}")
    return Column.ragged(arrays, column.dtype) if ndim else Column(np.array(arrays, dtype=column.dtype))


def _numbers(value: object, dtype: str) -> np.ndarray:
    given = np.asarray(value)
    with np.errstate(invalid="ignore"):
        numbers = given.astype(dtype)
    # A fractional token id would silently become another token.
    if numbers.dtype.kind == "i" and not np.array_equal(numbers, given):
        raise ValueError(f"{value!r:.100} cannot be {dtype}")
    return numbers


def load_op(name: str, folder: Path | None) -> Op:
    """The function of `dagrl.ops.NAME`, or the user's ``module:function`` (also searched in `folder`) as an op."""
    if ":" not in name:
        return getattr(import_module(f"dagrl.ops.{name}"), name)
    from dagrl.ops.custom import custom_op

    return custom_op(name, folder)
