"""The first steps of a run beside the planner's simulation of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from dagrl.backends.families.registry import model_shape
from dagrl.backends.planning.gpus import DEFAULT_GPU, gpu_named
from dagrl.config.schema import Pipeline
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.simulation.costs import Costs, measured_costs
from dagrl.planner.simulation.simulate import Simulated, simulate
from dagrl.reporting.measured_run import lengths_of_run
from dagrl.reporting.run_data.run_reader import RunReader
from dagrl.scheduler.intervals import Activity, Interval, busy_seconds
from dagrl.scheduler.plan import Plan

MOST_STEPS = 20
"""Number of simulated steps, from the first on; later ones are similar."""


class NodeSeconds(NamedTuple):
    """Busy seconds in a step of a node or of a move of an engine; None if it did not run."""

    name: str
    executor: str
    planned: float | None
    actual: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Steps 1 to `steps` of a run, planned and actual."""

    run: RunReader
    actual: list[Activity]
    simulated: Simulated
    steps: int
    basis: str
    """The source of the simulation's seconds, for the report."""

    def nodes(self) -> list[NodeSeconds]:
        """The nodes and moves of a step, the longest first; last the whole step, ``a step``."""
        seconds = [_seconds(self.simulated.activities, self.steps), _seconds(self.actual, self.steps)]
        places = sorted(seconds[0] | seconds[1], key=lambda place: -max(side.get(place, 0.0) for side in seconds))
        rows = [NodeSeconds(*place, *(side.get(place) for side in seconds)) for place in places]
        planned = [took for step, took in self.simulated.step_seconds.items() if step > 0]
        actual = [took for step, took in self.run.step_seconds.items() if 0 < step <= self.steps]
        return [*rows, NodeSeconds("a step", "", fmean(planned), fmean(actual) if actual else None)]

    def idle(self) -> dict[str, tuple[float | None, float | None]]:
        """Group -> its share of idle time, planned and actual; None if it ran nothing."""
        simulated = (activity for activity in self.simulated.activities if activity.step <= self.steps)
        planned = idle_shares(simulated, self.simulated.step_seconds)
        actual = idle_shares(self.actual, self.run.step_seconds)
        return {group: (planned.get(group), actual.get(group)) for group in planned | actual}


def compare_with_plan(run: RunReader, gpu: str | None = None) -> Comparison:
    """Simulate the run's first steps with the cost model, or with the run's own times if that lacks GPUs or model.

    `gpu` is the GPU of groups that name none. PipelineError; ValueError if there is nothing to compare.
    """
    planned_by = run.pipeline()
    if not run.last_step or not run.spans:
        raise ValueError(f"{run.folder} has no finished step with a timeline yet, so that there is nothing to compare")
    pipeline, plan = planned_by.pipeline, planned_by.plan
    steps = min(run.last_step, MOST_STEPS)
    costs, basis = _costs(run, pipeline, plan, gpu)
    simulated = simulate(replace(plan, steps=max(plan.steps, steps)), costs, steps)
    return Comparison(run, [activity for activity in run.spans if 0 < activity.step <= steps], simulated, steps, basis)


def idle_shares(activities: Iterable[Activity], step_seconds: Mapping[int, float]) -> dict[str, float]:
    """Group -> share of the time in which none of its activities runs while steps are under way.

    A step is under way from its first activity, or from `step_seconds` before the end of its last one, whichever is
    earlier. The start of a run and the pause before a resume belong to no step.
    """
    by_group: dict[str, list[Activity]] = defaultdict(list)
    by_step: dict[int, list[Activity]] = defaultdict(list)
    for activity in activities:
        by_group[activity.group].append(activity)
        by_step[activity.step].append(activity)
    steps = []
    for step, own in by_step.items():
        end = max(activity.end for activity in own)
        start = min(activity.start for activity in own)
        steps.append(Interval(min(start, end - step_seconds.get(step, 0.0)), end))
    whole = busy_seconds(steps)
    return {group: 1 - busy_seconds(own) / whole if whole else 0.0 for group, own in sorted(by_group.items())}


def _costs(run: RunReader, pipeline: Pipeline, plan: Plan, gpu: str | None) -> tuple[Costs, str]:
    try:
        shape = model_shape(pipeline.model)
        unknown = _without_model(pipeline, gpu)
    except ValueError as error:
        shape, unknown = None, str(error)
    if shape is None or unknown:
        half = max(1, run.last_step // 2)
        measured = measured_costs(plan, [activity for activity in run.spans if 0 < activity.step <= half])
        return measured, f"the times of the first half of its own steps (no cost model: {unknown})"
    name = gpu_named(gpu).name if gpu is not None else DEFAULT_GPU
    lengths = replace(lengths_of_run(run, pipeline, run.by_step), prompt_tokens=None)
    return PipelineCosts(pipeline, plan, shape, name, lengths), "the cost model of `dagrl plan`"


def _without_model(pipeline: Pipeline, gpu: str | None) -> str:
    """The reason why the cost model does not know the pipeline's hardware; empty if it does."""
    if any(group.is_cpu for group in pipeline.groups.values()):
        return "it does not cover CPU slots"
    unnamed = [name for name, group in pipeline.groups.items() if not group.gpu]
    return "" if gpu or not unnamed else f"group {unnamed[0]} names no GPU (`--gpu NAME` does)"


def _seconds(activities: Iterable[Activity], steps: int) -> dict[tuple[str, str], float]:
    spans: dict[tuple[str, str], dict[int, list[Activity]]] = defaultdict(lambda: defaultdict(list))
    for activity in activities:
        if 0 < activity.step <= steps:
            spans[activity.name, activity.executor][activity.step].append(activity)
    return {place: sum(map(busy_seconds, by_step.values())) / steps for place, by_step in spans.items()}
