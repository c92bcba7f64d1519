"""The rows that a node computes, where it does not compute all of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dagrl.config.errors import counted
from dagrl.config.schema import LogprobNode
from dagrl.data.batch import Batch, Column
from dagrl.ops.base import Context
from dagrl.ops.view import view_of
from dagrl.plugins.calls import call_or_stop
from dagrl.plugins.custom import load_function, located
from dagrl.plugins.declarations import rule_columns


def selected_rows(node: LogprobNode, batch: Batch, context: Context) -> np.ndarray | None:
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
        chosen &= np.array([each in values for each in of_rows], dtype=bool)
    return np.flatnonzero(chosen)


def for_every_row(columns: Mapping[str, Column], rows: np.ndarray | None, batch: Batch) -> dict[str, Column]:
    """Token columns of the selected `rows` as those of `batch`: NaN in the other rows, or -1 in columns of integers."""
    if rows is None or len(rows) == len(batch):
        return dict(columns)
    tokens = batch["response_tokens"]
    offsets = np.concatenate([[0], np.cumsum(tokens.lengths)])
    is_selected = np.zeros(len(batch), dtype=bool)
    is_selected[rows] = True
    at = np.repeat(is_selected, tokens.lengths)
    spread = {}
    for name, column in columns.items():
        missing = np.nan if column.values.dtype.kind == "f" else -1
        values = np.full((len(at), *column.values.shape[1:]), missing, dtype=column.values.dtype)
        values[at] = column.values
        spread[name] = Column(values, offsets)
    return spread


def _by_function(place: str, batch: Batch, context: Context) -> np.ndarray:
    """The user's function as a choice of rows, bool [rows]."""
    function = load_function(place, context.resources.folder)
    seen = view_of(batch)
    answer = call_or_stop(place, function, {name: seen[name] for name in rule_columns(function, {})})
    chosen = np.asarray(answer)
    if chosen.shape != (len(batch),) or chosen.dtype != bool:
        expected = f"return a list of {counted(len(batch), 'bool')}, one for each row"
        raise ValueError(f"{located(function, place)} returned {answer!r:.100}; {expected}")
    return chosen
