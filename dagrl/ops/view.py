"""Columns as user functions receive them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dagrl.data.batch import Batch


def view_of(batch: Batch) -> dict[str, Any]:
    """Columns by name: an array if a row has one value, else a list with one array or string per row."""
    view: dict[str, Any] = {}
    for name, column in batch.columns.items():
        if column.offsets is None:
            view[name] = column.values
        elif column.values.dtype == np.uint8 and column.values.ndim == 1:
            view[name] = column.strings()
        else:
            view[name] = [column[row] for row in range(len(column))]
    return view
