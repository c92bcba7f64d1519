"""The weights of sources over the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Stage:
    """Weights for a part of a run."""

    weights: tuple[float, ...]
    """The weight of each source."""
    until_step: int | None = None
    """Its last step."""
    until_metric: Mapping[str, float] = field(default_factory=dict)
    """It ends when each of these metrics has reached its value in one step."""
    move_over: int = 0
    """Steps in which the weights move linearly from those of the stage before."""


class Stages:
    """Stages, one after the other; one alone has constant weights."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self.current = list(stages[0].weights)
        """The weights of the newest step."""
        self._stage, self._began = 0, 1
        self._reached = False
        """Whether the metrics of the stage have reached their values."""

    @property
    def metrics(self) -> frozenset[str]:
        return frozenset(name for stage in self._stages for name in stage.until_metric)

    def weights(self, step: int) -> list[float]:
        """The weights in `step`; steps come in order."""
        while self._ends_before(step):
            self._stage, self._began, self._reached = self._stage + 1, step, False
        stage = self._stages[self._stage]
        part = min(1.0, (step - self._began + 1) / (stage.move_over + 1))
        before = self._stages[max(0, self._stage - 1)].weights
        self.current = [old + part * (new - old) for old, new in zip(before, stage.weights, strict=True)]
        return self.current

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step. Steps that overlap with the stage before say nothing about this one."""
        wanted = self._stages[self._stage].until_metric
        if wanted and step >= self._began:
            self._reached |= all(metrics.get(name, -float("inf")) >= wanted[name] for name in wanted)

    def state(self) -> dict[str, Any]:
        return {"stage": self._stage, "began": self._began, "reached": self._reached, "current": self.current}

    def load(self, state: Mapping[str, Any]) -> None:
        self._stage = min(state["stage"], len(self._stages) - 1)
        self._began, self._reached = state["began"], state["reached"]
        if len(state["current"]) == len(self.current):
            self.current = state["current"]

    def _ends_before(self, step: int) -> bool:
        stage = self._stages[self._stage]
        over = self._reached or (stage.until_step is not None and step > stage.until_step)
        return over and self._stage + 1 < len(self._stages)
