"""The metrics of a run as columns."""

from __future__ import annotations

import math
from typing import Any

from dagrl.reporting.run_data.run_reader import RunReader

_SPARSE = 0.5
"""A metric that fewer steps have, such as those of validations, is a list of places and one of values."""


def metrics_table(run: RunReader, first: int = 0) -> dict[str, Any]:
    """The steps from place `first` on: their numbers, the hours at which they ended, and a column for each metric.

    A column is a list with a value or None for each step, or ``{"at": places, "values": values}`` if most steps lack
    it; places count from 0 in this table. Numbers have six digits; NaN and infinity are None.
    """
    steps = run.steps[first:]
    numbers = [step["step"] for step in steps]
    names = dict.fromkeys(name for step in steps for name in step if name != "step")
    return {
        "generation": run.generation,
        "first": first,
        "steps": numbers,
        "hours": _hours(run, numbers),
        "columns": {name: _column([_short(step.get(name)) for step in steps]) for name in sorted(names)},
    }


def _column(values: list[float | None]) -> list[float | None] | dict[str, list]:
    at = [place for place, value in enumerate(values) if value is not None]
    if len(at) >= _SPARSE * len(values):
        return values
    return {"at": at, "values": [values[place] for place in at]}


def _hours(run: RunReader, steps: list[int]) -> list[float | None]:
    """Hours from the start of the first activity to the end of each step."""
    if not run.spans:
        return [None] * len(steps)
    begin = run.spans[0].start
    windows = (run.window(step) for step in steps)
    return [round((window.end - begin) / 3600, 6) if window else None for window in windows]


def _short(value: float | None) -> float | None:
    if value is None or isinstance(value, int):
        return value
    # JSON has neither NaN nor infinity.
    return float(f"{value:.6g}") if math.isfinite(value) else None
