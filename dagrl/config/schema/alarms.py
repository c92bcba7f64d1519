"""Conditions on a step's metrics: ``run.warn_when`` and ``run.stop_when``.

    METRIC COMPARISON NUMBER [usual] [for STEPS]

``grad_norm > 10 usual`` compares with a multiple of the metric's usual value, a median of earlier steps.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM = re.compile(
    rf"(?P<metric>[^\s<>=!]+)\s*(?P<comparison>{'|'.join(_COMPARISONS)})\s*(?P<number>[^\s<>=!]+)"
    r"(?P<usual>\s+usual)?(\s+for\s+(?P<steps>[1-9]\d{0,5})(\s+steps?)?)?",
    re.ASCII,
)
_EXAMPLE = "write `grad_norm > 100`, `reward/std == 0 for 5` or `throughput/tokens_per_s < 0.5 usual for 3`"


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a metric."""

    text: str
    """As in the pipeline file."""
    metric: str
    comparison: str
    number: float
    of_usual: bool
    """Whether `number` is a multiple of the metric's usual value."""
    steps: int
    """Consecutive steps in which it must be met."""

    def is_met(self, value: float, usual: float | None) -> bool:
        """Whether a finite value meets it. `usual`: None if it is not known, so that no multiple of it is met."""
        if self.of_usual and usual is None:
            return False
        bound = self.number * usual if self.of_usual and usual is not None else self.number
        return _COMPARISONS[self.comparison](value, bound)


def parse_condition(text: str) -> Condition:
    """Read a condition. ValueError for any other text."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"`{text}` is not a condition; {_EXAMPLE}")
    try:
        number = float(match["number"])
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"`{match['number']}` in `{text}` is not a finite number; {_EXAMPLE}")
    return Condition(
        text.strip(), match["metric"], match["comparison"], number, bool(match["usual"]), int(match["steps"] or 1)
    )


def _is_condition(text: str) -> str:
    parse_condition(text)
    return text


ConditionText = Annotated[str, AfterValidator(_is_condition)]

WARNINGS = (
    "reward/std == 0 for 5",
    "entropy < 0.01 for 3",
    "grad_norm > 10 usual",
    "critic/grad_norm > 10 usual",
    "mismatch/kl > 0.1",
    "mismatch/unknown_fraction > 0",
    "agent/failed_fraction > 0.5 for 3",
    "throughput/tokens_per_s < 0.5 usual for 3",
)
STOPS = (
    "failed/judge > 0.5 for 3",
    "failed/reward > 0.5 for 3",
    "failed/environment > 0.5 for 3",
    "failed/agent > 0.5 for 3",
)
"""The default of ``run.stop_when``: most samples are lost to failures of infrastructure."""


def with_defaults(own: Iterable[str], defaults: Iterable[str]) -> tuple[Condition, ...]:
    """The conditions of a list, and defaults on other metrics than theirs; none at all of an empty list."""
    conditions = tuple(map(parse_condition, own))
    named = {condition.metric for condition in conditions}
    further = (parse_condition(text) for text in defaults if named)
    return conditions + tuple(condition for condition in further if condition.metric not in named)
