"""Corrects the cost model by the times of a run: measured seconds over estimated ones, by node and engine.

For the plan of another pipeline, `applied` keeps the factors that apply to it and lists extrapolations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dagrl.backends.planning.gpus import gpu_of_group
from dagrl.config.schema import Pipeline
from dagrl.planner.cost.lengths import Assumed
from dagrl.planner.simulation.costs import Work, move_of
from dagrl.scheduler.commands import Command, Commit, Run
from dagrl.scheduler.plan import HOST, Plan, Rows

CPU = "CPU slots"
_LEAST_S = 1e-5
"""Smaller estimates are not used as a measure."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Factors to the cost model's seconds. The default changes nothing."""

    work: Mapping[Work, float] = field(default_factory=dict)
    """Measured over estimated seconds of a step."""
    engines: Mapping[str, float] = field(default_factory=dict)
    """Executor -> the same over all of its tasks, for tasks outside of the run."""
    driver_s: float = 0.0
    """Seconds of a step in which the driver commits, schedules and dispatches, outside of commands."""

    def factor(self, command: Command, plan: Plan) -> float:
        match command:
            case Run(_, task):
                executor = plan.task(task).executor
                return self.work.get(Work(task, executor), self.engines.get(executor, 1.0))
            case Commit():
                return 1.0
            case _:
                return self.work.get(move_of(command), 1.0)


def calibrate(plan: Plan, estimated: Mapping[Work, float], measured: Mapping[Work, float]) -> Calibration:
    """The factors between seconds of a step's work, both by `seconds_of_step`."""
    both = [work for work in measured if estimated.get(work, 0.0) > _LEAST_S]
    tasks = {Work(task.name, task.executor) for task in plan.tasks}
    engines: dict[str, float] = {}
    for executor in {work.executor for work in both if work in tasks}:
        own = [work for work in both if work in tasks and work.executor == executor]
        engines[executor] = sum(measured[work] for work in own) / sum(estimated[work] for work in own)
    return Calibration({work: measured[work] / estimated[work] for work in both}, engines)


@dataclass(frozen=True, slots=True)
class RunTimes:
    """A run's measured times beside the cost model's."""

    folder: str
    steps: int
    """Number of measured steps."""
    last: int
    """The newest measured step."""
    step_s: float
    """Median seconds of a step."""
    estimated: Mapping[Work, float]
    measured: Mapping[Work, float]
    """Seconds of a step."""
    calibration: Calibration
    lengths: Assumed
    """Mean tokens of its prompts and responses."""
    devices: Mapping[str, str]
    """Executor -> device of its ranks."""
    layout: str
    """Description of the run's layout."""
    pipeline: Pipeline

    def lengths_for(self, pipeline: Pipeline, known: Assumed) -> Assumed:
        """Return the lengths to assume for a pipeline: those `known`, then the run's if model and data are the same."""
        if (pipeline.model, pipeline.data.sources) != (self.pipeline.model, self.pipeline.data.sources):
            return known
        return self.lengths.unless(known)


@dataclass(frozen=True, slots=True)
class Applied:
    """A calibration for the plan of a pipeline."""

    times: RunTimes
    calibration: Calibration
    notes: tuple[str, ...]
    """Notes on extrapolated or uncalibrated parts."""


def devices_of(pipeline: Pipeline, plan: Plan, gpu: str) -> dict[str, str]:
    """Executor -> the name of its GPUs, `gpu` where the file names none, or `CPU`; not of the host."""
    devices = {}
    for name, executor in plan.executors.items():
        if executor.group is not None:
            device = gpu_of_group(pipeline, executor.group, gpu)
            devices[name] = device.name if device else CPU
    return devices


def applied(times: RunTimes, pipeline: Pipeline, plan: Plan, devices: Mapping[str, str]) -> Applied:
    """Keep the factors for executors on `devices` that ran on the same kind."""
    another = {
        task.name
        for task in plan.tasks
        if task.executor == HOST and pipeline.nodes.get(task.node) != times.pipeline.nodes.get(task.node)
    }
    other = {name: there for name, there in times.devices.items() if devices.get(name, there) != there}
    calibration = Calibration(
        {
            work: factor
            for work, factor in times.calibration.work.items()
            if work.executor not in other and work.name not in another
        },
        {name: factor for name, factor in times.calibration.engines.items() if name not in other | {HOST: ""}},
        times.calibration.driver_s,
    )
    notes = [f"{name} is not calibrated: it ran on {there}, not on {devices[name]}" for name, there in other.items()]
    notes += [f"{name} is not calibrated: the run had another {name}" for name in sorted(another)]
    if pipeline.model != times.pipeline.model:
        notes.append("the run had another model: its factors are extrapolated to this one, its lengths are not taken")
    works = [
        Work(task.name, task.executor) for task in plan.tasks if task.rows is Rows.TRAIN and task.executor not in other
    ]
    unseen = [work for work in works if work not in calibration.work and work.executor != HOST]
    by_engine = [work.name for work in unseen if work.executor in calibration.engines]
    if by_engine:
        notes.append(f"the run did not have {', '.join(by_engine)}: extrapolated by the factor of the whole engine")
    lacking = [work.name for work in unseen if work.executor not in calibration.engines]
    if lacking:
        notes.append(f"the run did not have {', '.join(lacking)}: as the cost model estimates")
    return Applied(times, calibration, tuple(notes))
