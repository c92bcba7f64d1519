"""``merge``: takes each row from the first of several columns that has the row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagrl.config.errors import listed
from dagrl.config.schema import MergeNode
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.ops.base import Context, OpInput, Output


def merge(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield the merged rows of each shard. Raises ValueError if no column has a row, unless these are skipped."""
    node = context.declared(MergeNode)
    (written, *_) = node.contract().writes
    for part in parts:
        batch = part.batch
        columns = [batch[name] for name in node.columns]
        has = np.array([_has_row(column) for column in columns]).reshape(len(columns), len(batch))
        covered = np.any(has, axis=0)
        if node.uncovered == "stop" and not covered.all():
            raise ValueError(_uncovered(node, batch, int(np.flatnonzero(~covered)[0])))
        # The first column that has the row; column 0 if no column has it.
        rows = has.argmax(axis=0) * len(batch) + np.arange(len(batch))
        merged = {written: Column.concat(columns).take(rows)}
        if node.uncovered == "skip":
            merged["teacher_mask"] = Column(covered.astype(np.float32))
        # Scores, which have one value a row, are of judges.
        taught = {} if columns[0].offsets is None else {"distillation/taught_fraction": Stat.of(covered)}
        yield Output((part.index,), batch.rows, merged, taught)


def _has_row(column: Column) -> np.ndarray:
    """Bool [rows]: whether any number of the row is given. A row without numbers lacks nothing."""
    values = column.values
    given = ~np.isnan(values) if values.dtype.kind == "f" else values >= 0
    given = given.reshape(len(values), -1).any(axis=1)
    row = np.repeat(np.arange(len(column)), column.lengths)
    return (np.bincount(row, given, minlength=len(column)) > 0) | (column.lengths == 0)


def _uncovered(node: MergeNode, batch: Batch, row: int) -> str:
    source = f" of the source `{batch['data_set'].string(row)}`" if "data_set" in batch else ""
    fact = f"no column of {listed(node.columns)} has the sample {batch.rows[row]}{source}"
    return f"{fact}; add its rows to those of a node (`rows`), or set `uncovered: skip` to train without it"
