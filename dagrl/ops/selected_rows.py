"""The rows that a node computes, where it computes some: ``rows`` of its section."""

from __future__ import annotations

import numpy as np

from dagrl.config.errors import counted
from dagrl.config.schema import SelectiveNode
from dagrl.data.batch import Batch, Column, view_of
from dagrl.ops.base import Context
from dagrl.plugins.calls import call_or_stop
from dagrl.plugins.custom import load_function, located
from dagrl.plugins.declarations import rule_columns


def selected_rows(node: SelectiveNode, batch: Batch, context: Context) -> np.ndarray | None:
    """Indices of the rows that the node computes, int64; None for all. Raises ValueError if its function fails."""
    if node.rows is None:
        return None
    if isinstance(node.rows, str):
        return np.flatnonzero(_by_function(node.rows, batch, context))
    seen = view_of(batch)
    chosen = np.ones(len(batch), dtype=bool)
    for name, values in node.rows.items():
        of_rows = seen[name]
        if len(of_rows) and np.ndim(of_rows[0]):
            raise ValueError(f"`rows` selects by one value a row, and `{name}` has several; name another column")
        chosen &= np.array([value in values for value in of_rows], dtype=bool)
    return np.flatnonzero(chosen)


def _by_function(place: str, batch: Batch, context: Context) -> np.ndarray:
    function = load_function(place, context.resources.folder)
    seen = view_of(batch)
    answer = call_or_stop(place, function, {name: seen[name] for name in rule_columns(function, {})})
    chosen = np.asarray(answer)
    if chosen.shape != (len(batch),) or chosen.dtype != bool:
        expected = f"return a list of {counted(len(batch), 'bool')}, one for each row"
        raise ValueError(f"{located(function, place)} returned {answer!r:.100}; {expected}")
    return chosen


def spread_values(values: np.ndarray, rows: np.ndarray | None, count: int) -> Column:
    """Values of the selected `rows` of `count`, one each; NaN in the others."""
    if rows is None:
        return Column(values.astype(np.float32))
    whole = np.full(count, np.nan, dtype=np.float32)
    whole[rows] = values
    return Column(whole)
