"""Corrects the cost model by the times of a run: measured seconds over estimated ones, by node and engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dagrl.planner.simulation.measured import Work
from dagrl.scheduler.commands import Command, Commit, Run, Sync
from dagrl.scheduler.plan import Plan

_LEAST_S = 1e-5
"""Estimates below this are no measure."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Factors to the cost model's seconds. The default changes nothing."""

    work: Mapping[Work, float] = field(default_factory=dict)
    """Measured over estimated seconds of a step."""
    engines: Mapping[str, float] = field(default_factory=dict)
    """Executor -> the same over all of its tasks, for tasks that the run did not have."""
    driver_s: float = 0.0
    """Seconds of a step in which the driver commits, schedules and dispatches, which are no command's."""

    def factor(self, command: Command, executor: str) -> float:
        """Return the factor to a command's seconds; a run's task is on `executor`."""
        match command:
            case Run(_, task):
                return self.work.get(Work(task, executor), self.engines.get(executor, 1.0))
            case Commit():
                return 1.0
            case _:
                return self.work.get(Work(type(command).__name__.lower(), executor), 1.0)


def executor_of(command: Command, plan: Plan) -> str:
    """The executor whose time a command takes: the receiver of a sync; none of a commit."""
    match command:
        case Run(_, task):
            return plan.task(task).executor
        case Sync(_, follower, _, _):
            return follower
        case Commit():
            return ""
        case _:
            return command.executor


def calibrate(plan: Plan, estimated: Mapping[Work, float], measured: Mapping[Work, float]) -> Calibration:
    """The factors between seconds of a step's work, both by `seconds_of_step`."""
    both = [work for work in measured if estimated.get(work, 0.0) > _LEAST_S]
    tasks = {Work(task.name, task.executor) for task in plan.tasks}
    engines: dict[str, float] = {}
    for executor in {work.executor for work in both if work in tasks}:
        own = [work for work in both if work in tasks and work.executor == executor]
        engines[executor] = sum(measured[work] for work in own) / sum(estimated[work] for work in own)
    return Calibration({work: measured[work] / estimated[work] for work in both}, engines)
