"""Alarms on the metrics of a run. They follow from metrics.jsonl alone, so that a resumed run goes on as if it had not
stopped, and a report finds the same ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from pydantic import ValidationError

from dagrl.config.schema import RunSpec
from dagrl.config.schema.alarms import Condition

_HISTORY, _LEAST_HISTORY = 20, 5
"""Earlier steps whose median is a metric's usual value, and the number from which on it is known."""
_HINTS = {
    "reward/std": "all responses of a step get the same reward, so that nothing is learned; read samples/",
    "entropy": "the policy has stopped exploring; lower the learning rate, or set clip_ratio_high or entropy_coef",
    "mismatch/kl": "generator and trainer disagree about the same weights (docs/mismatch.md)",
    "mismatch/unknown_fraction": "the generator's log-prob of these tokens is NaN or infinite, and corrections leave "
    "them out; look at its precision and weights (docs/mismatch.md)",
}


@dataclass(frozen=True, slots=True)
class Alarm:
    """A condition that was met at the end of a step, in the last `Condition.steps` steps that measured its metric."""

    step: int
    condition: Condition
    stops: bool
    """Whether it ends the run."""
    begins: bool
    """Whether the steps before were without it."""
    value: float
    usual: float | None
    """The usual value, if the condition is about a multiple of it."""

    def __str__(self) -> str:
        usual = "" if self.usual is None else f", usually {self.usual:.4g}"
        key = "run.stop_when" if self.stops else "run.warn_when"
        hint = _HINTS.get(self.condition.metric)
        about = f"; {hint}" if hint else ""
        return f"{self.condition.metric} is {self.value:.4g}{usual} ({key}: {self.condition.text}){about}"


@dataclass(slots=True)
class _Watch:
    condition: Condition
    stops: bool
    met: int = 0
    """Consecutive steps in which the condition was met."""
    history: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))

    def look(self, step: int, value: float) -> Alarm | None:
        condition, usual = self.condition, None
        if condition.of_usual:
            # No multiple of 0 says anything.
            usual = (median(self.history) or None) if len(self.history) >= _LEAST_HISTORY else None
            self.history.append(value)
        self.met = self.met + 1 if condition.is_met(value, usual) else 0
        begins = self.met == condition.steps
        # A run that is resumed while the cause lasts stops again.
        if begins or (self.stops and self.met > condition.steps):
            return Alarm(step, condition, self.stops, begins, value, usual)
        return None


class Alarms:
    """Finds the alarms of a run, step by step."""

    def __init__(self, run: RunSpec) -> None:
        warnings = ((condition, False) for condition in run.warnings)
        self._watches = [_Watch(*each) for each in (*warnings, *((condition, True) for condition in run.stops))]

    def look(self, step: int, metrics: Mapping[str, float | None]) -> list[Alarm]:
        """The alarms of the next step: a warning when it begins, and a stop in each step in which it lasts.

        A step without the metric, or without a finite value, counts for neither; as null in metrics.jsonl.
        """
        alarms = []
        for watch in self._watches:
            value = metrics.get(watch.condition.metric)
            if value is not None and math.isfinite(value) and (alarm := watch.look(step, value)):
                alarms.append(alarm)
        return alarms


def alarms_of(steps: Iterable[Mapping[str, float]], run: Mapping[str, object]) -> list[Alarm]:
    """The alarms of the lines of metrics.jsonl, each when it begins. `run`: the section of the pipeline file, without
    which, or with a wrong one, the conditions are the default ones.
    """
    try:
        alarms = Alarms(RunSpec.model_validate({"steps": 0, **run}))
    except ValidationError:  # of another version
        alarms = Alarms(RunSpec(steps=0))
    return [alarm for line in steps for alarm in alarms.look(int(line["step"]), line) if alarm.begins]
