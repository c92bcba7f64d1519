"""The result of a program for its trajectory, and its failure.

Imports the standard library alone: functions may run in a Python without dagrl's packages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dagrl.environments.contract import Unscored
from dagrl.environments.failures import FailureClass

_MOST_METRICS = 1000
_METRIC = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,200}")


class ProgramError(RuntimeError):
    """A program failed for a trajectory."""

    def __init__(self, message: str, output: str = "", failure: FailureClass = "program") -> None:
        super().__init__(message)
        self.output, self.failure = output, failure


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """A program's result for its trajectory."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    output: str = ""
    """The end of its printed output."""
    state: object = None
    """The state to score, if the reward is given when the whole group has ended."""


def program_result(returned: object, output: str = "") -> ProgramResult:
    """Read the verdict from a program's return value: a number, a mapping with ``reward`` and metrics, or nothing.

    Raises ProgramError for anything else.
    """
    if isinstance(returned, Unscored):
        return ProgramResult(output=output, state=returned.state)
    if returned is None:
        return ProgramResult(output=output)
    values = returned if isinstance(returned, Mapping) else {"reward": returned}
    numbers = {}
    if len(values) > _MOST_METRICS:
        raise ProgramError(f"it returned {len(values):,} numbers; return {_MOST_METRICS} at most", output)
    for name, value in values.items():
        if isinstance(name, str) and not _METRIC.fullmatch(name):
            raise ProgramError(f"it returned a number {name!r:.200}; give it a shorter name, in one line", output)
        number = _number(value)
        if not isinstance(name, str) or number is None:
            raise ProgramError(
                f"it returned {returned!r:.200}; return a number, or a dict with `reward` and other numbers", output
            )
        numbers[name] = number
    return ProgramResult(numbers.pop("reward", None), numbers, output)


def _number(value: Any) -> float | None:
    """Convert a finite number to a plain float; None for any other value."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and not isinstance(value, str) else None
