"""Compares columns, metrics and weights bit by bit, and reports places and sizes of differences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.weight_sync.protocol import WeightDigests

_MOST_ROWS = 5
_COMPARED = {"mean": "", "low": "least value ", "high": "largest value "}
"""Compared fields of a metric, with their names in messages."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of two results."""

    what: str
    """For example ``column ref_logprob``."""
    text: str
    """The rows, and the size of the difference."""
    size: float
    """Largest difference relative to the column's largest magnitude, or to the metric's, at least 1; infinite where
    values cannot be compared."""
    rows: tuple[int, ...] = ()
    """Ids of the rows that differ, of a column."""


def compare_columns(recorded: Batch, replayed: Batch) -> list[Difference]:
    differences = []
    for name in recorded.columns:
        if name not in replayed:
            differences.append(Difference(f"column {name}", "is missing", math.inf))
        elif (difference := _compare(name, recorded.rows, recorded[name], replayed[name])) is not None:
            differences.append(difference)
    return differences


def _compare(name: str, rows: np.ndarray, recorded: Column, replayed: Column) -> Difference | None:
    places = [place for place in range(len(rows)) if not _equal(recorded[place], replayed[place])]
    if not places:
        return None
    size = max(_distance(recorded[place], replayed[place]) for place in places)
    scale = max(_magnitude(recorded), _magnitude(replayed))
    first = places[0]
    ids = [int(rows[place]) for place in places]
    shown = ", ".join(map(str, ids[:_MOST_ROWS])) + (", ..." if len(ids) > _MOST_ROWS else "")
    text = f"{len(ids)} of {len(rows)} rows differ ({shown}); row {ids[0]}{_where(recorded[first], replayed[first])}"
    if math.isfinite(size):
        text += f"; largest difference {size:.3g}"
        text += f", {size / scale:.1e} of the largest value" if scale else ""
    return Difference(f"column {name}", text, size / scale if scale and math.isfinite(size) else size, tuple(ids))


def _equal(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two rows have the same type, shape and bits: NaN is equal to itself, and -0.0 is not 0.0."""
    left, right = np.asarray(left), np.asarray(right)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def _distance(left: np.ndarray, right: np.ndarray) -> float:
    """The largest difference of two rows; infinite if they cannot be subtracted."""
    left, right = np.asarray(left), np.asarray(right)
    if left.shape != right.shape or left.dtype == np.uint8:  # text
        return math.inf
    with np.errstate(invalid="ignore"):
        difference = np.abs(left.astype(np.float64) - right.astype(np.float64))
    same = (left == right) | (np.isnan(left) & np.isnan(right) if left.dtype.kind == "f" else False)
    largest = float(np.where(same, 0.0, difference).max(initial=0.0))
    return largest if math.isfinite(largest) else math.inf


def _magnitude(column: Column) -> float:
    values = np.abs(column.values.astype(np.float64)) if column.values.dtype.kind in "fiu" else np.zeros(0)
    return float(np.where(np.isfinite(values), values, 0.0).max(initial=0.0))


def _where(left: np.ndarray, right: np.ndarray) -> str:
    """The first place at which two rows differ, with both values."""
    left, right = np.asarray(left), np.asarray(right)
    if left.dtype == np.uint8 and right.dtype == np.uint8 and left.ndim == 1:
        return f": {bytes(left).decode(errors='replace')!r} and {bytes(right).decode(errors='replace')!r}"
    if left.ndim == 0:
        return f": {left} and {right}"
    if left.shape != right.shape:
        return f" has {len(left)} and {len(right)} values"
    flat = [left.reshape(-1), right.reshape(-1)]
    place = next((i for i in range(len(flat[0])) if not _equal(flat[0][i], flat[1][i])), None)
    if place is None:
        return f" is {left.dtype} and {right.dtype}"
    return f", value {place}: {flat[0][place]} and {flat[1][place]}"


def compare_metrics(recorded: Mapping[str, Stat], replayed: Mapping[str, Stat]) -> list[Difference]:
    differences = []
    for name in dict.fromkeys((*recorded, *replayed)):
        if name not in recorded or name not in replayed:
            where = "was not recorded" if name not in recorded else "is missing"
            differences.append(Difference(f"metric {name}", where, math.inf))
            continue
        left, right = recorded[name], replayed[name]
        # NaN is equal to itself.
        what = next((what for what in _COMPARED if not _same(getattr(left, what), getattr(right, what))), None)
        if what is None:
            # Other layouts sum in other parts and measure other times, which is not a difference.
            continue
        ours, theirs = getattr(left, what), getattr(right, what)
        # Many metrics are differences of numbers around 1, and near 0 themselves.
        size = abs(ours - theirs) / max(1.0, abs(ours), abs(theirs))
        size = size if math.isfinite(size) else math.inf
        differences.append(Difference(f"metric {name}", f"{_COMPARED[what]}{ours!r} and {theirs!r}", size))
    return differences


def _same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


def compare_weights(recorded: WeightDigests, replayed: WeightDigests) -> Difference | None:
    """The weights that differ, by the norms of the tensors that do."""
    if recorded == replayed:
        return None
    names = [name for name, (digest, _) in recorded.items() if name not in replayed or replayed[name][0] != digest]
    missing = [name for name in dict.fromkeys((*recorded, *replayed)) if name not in recorded or name not in replayed]
    if missing:
        return Difference("weights", f"{missing[0]} and {len(missing) - 1} more are only on one side", math.inf)
    sizes = {name: _norm_distance(recorded[name][1], replayed[name][1]) for name in names}
    largest = max(sizes, key=sizes.__getitem__)
    text = (
        f"{len(names)} of {len(recorded)} tensors differ; norms by at most {sizes[largest]:.1e} of themselves "
        f"({largest})"
    )
    return Difference("weights", text, sizes[largest])


def _norm_distance(left: float, right: float) -> float:
    scale = max(abs(left), abs(right))
    size = abs(left - right) / scale if scale else 0.0
    return size if math.isfinite(size) else math.inf
