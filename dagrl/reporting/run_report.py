"""Summarizes a run, compares it with its plan, and writes both as Chrome traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import RenderableType

from dagrl.backends.families.registry import model_shape
from dagrl.backends.fit import place
from dagrl.backends.planning.gpus import DEFAULT_GPU, gpu_named
from dagrl.config.errors import PipelineError, counted
from dagrl.config.loading.loader import LoadedPipeline, load_pipeline
from dagrl.config.schema import Pipeline
from dagrl.orchestrator.folder.run_graph import graph_of_run
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.cost.lengths import Assumed
from dagrl.planner.showing.report import Report
from dagrl.planner.simulation.costs import Costs
from dagrl.planner.simulation.measured import measured_costs
from dagrl.planner.simulation.simulate import Simulated, simulate
from dagrl.reporting.run_record import RunRecord, read_run
from dagrl.reporting.summary import summary, summary_values
from dagrl.scheduler.intervals import Activity, Interval, busy_seconds
from dagrl.scheduler.plan import Plan, WorkerId
from dagrl.tables import render, table
from dagrl.tracking.run_file import run_file
from dagrl.tracking.timeline import write_trace

MOST_STEPS = 20
"""Steps that are simulated, from the first on: the others are like them."""
TRACE = "timeline_planned.json"
_TRACED_STEPS = 4
"""Steps in the trace of a plan, and one more for each step that may overlap."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The simulation of a run's first steps."""

    simulated: Simulated
    steps: int
    basis: str
    """The source of its seconds, for the report."""


def report_run(folder: Path, *, timeline: bool = False, gpu: str | None = None) -> str:
    """Summarize a run; with `timeline` compare it with its plan, and write both as a trace in the folder.

    `gpu` is the GPU of groups that name none. ValueError if there is no run, or nothing to plan it by;
    PipelineError if `pipeline.yaml` of the folder is wrong and needed.
    """
    if gpu is not None:
        gpu = gpu_named(gpu).name
    run = read_run(folder)
    loaded = _pipeline_of(folder, needed=timeline)
    actual = run.spans
    parts = summary(run, _idle_in_training(run, actual), loaded.pipeline.run.known_steps if loaded else None)
    if not timeline:
        return render(parts)
    if loaded is None:
        raise ValueError(f"{folder} holds no pipeline.yaml, so that there is nothing to plan its steps by")
    if not run.last_step or not actual:
        raise ValueError(f"{folder} has no finished step with a timeline yet, so that there is nothing to compare")
    planned = plan_again(run, loaded, actual, gpu)
    actual = [each for each in actual if 0 < each.step <= planned.steps]
    trace = folder / TRACE
    begin = min(each.start for each in actual)
    drawn = f"{trace}: both, to be opened in ui.perfetto.dev"
    try:
        both = [*_drawn(planned.simulated.activities, " (planned)", begin), *_drawn(actual, " (actual)")]
        write_trace(trace, both)
    except OSError as error:
        # The folder may be another user's: the tables are still of use.
        drawn = f"no trace: {error}"
    return render(
        [
            *parts,
            "",
            f"planned beside actual, steps 1 to {planned.steps}; planned by {planned.basis}",
            "",
            _by_node(planned, actual, run),
            "",
            _by_group(planned, actual, run),
            "",
            f"  {drawn}",
        ]
    )


def run_values(folder: Path) -> dict[str, Any]:
    """Summarize a run as plain values. ValueError if there is no run."""
    run = read_run(folder)
    loaded = _pipeline_of(folder, needed=False)
    values = summary_values(run, loaded.pipeline.run.known_steps if loaded else None)
    return values | {"idle": _idle_in_training(run, run.spans)}


def _pipeline_of(folder: Path, *, needed: bool) -> LoadedPipeline | None:
    """The run's pipeline; None if the file does not exist, or cannot be read and is not `needed`."""
    path = run_file(folder, "pipeline.yaml")
    try:
        return load_pipeline(path) if path else None
    except PipelineError:
        if needed:
            raise
        return None


def write_planned(found: Report, path: Path, assumed: Assumed) -> str:
    """Write the first steps of a plan that fits as a trace, and describe it in a line. OSError, ValueError."""
    plan = found.fit.plan
    costs = PipelineCosts(found.pipeline, plan, found.fit.shape, found.gpu, assumed)
    steps = min(plan.steps, _TRACED_STEPS + plan.max_staleness)
    simulated = simulate(plan, costs, steps)
    write_trace(path, _drawn(simulated.activities))
    return f"{path}: {counted(steps, 'step')} as planned, {simulated.seconds:,.1f} s; open it in ui.perfetto.dev"


def plan_again(run: RunRecord, loaded: LoadedPipeline, actual: Sequence[Activity], gpu: str | None) -> Planned:
    """Simulate the run's first steps with the cost model, or with the run's own times if that lacks GPUs or model."""
    placed = place(loaded.pipeline, graph_of_run(run.folder, loaded))
    pipeline, plan = placed.pipeline, placed.plan
    steps = min(run.last_step, MOST_STEPS)
    costs, basis = _costs(run, pipeline, plan, actual, gpu)
    longer = replace(plan, steps=max(plan.steps, steps))
    return Planned(simulate(longer, costs, steps), steps, basis)


def idle_shares(activities: Iterable[Activity], step_seconds: Mapping[int, float]) -> dict[str, float]:
    """Group -> share of the time in which none of its activities runs while steps are under way.

    A step is under way from its first activity, or from `step_seconds` before the end of its last one, whichever is
    earlier. The pause before a run that goes on, and its start, are in no step and count for nothing.
    """
    by_group: dict[str, list[Activity]] = defaultdict(list)
    by_step: dict[int, list[Activity]] = defaultdict(list)
    for each in activities:
        by_group[each.group].append(each)
        by_step[each.step].append(each)
    steps = []
    for step, found in by_step.items():
        end = max(each.end for each in found)
        start = min(each.start for each in found)
        steps.append(Interval(min(start, end - step_seconds.get(step, 0.0)), end))
    whole = busy_seconds(steps)
    return {group: 1 - busy_seconds(found) / whole if whole else 0.0 for group, found in sorted(by_group.items())}


def _idle_in_training(run: RunRecord, activities: Iterable[Activity]) -> dict[str, float]:
    """`idle_shares` without the validation before the first step."""
    return idle_shares((each for each in activities if each.step > 0), _step_seconds(run))


def _step_seconds(run: RunRecord) -> dict[int, float]:
    return {line["step"]: line["time/step_s"] for line in run.steps if line.get("time/step_s")}


def _costs(
    run: RunRecord, pipeline: Pipeline, plan: Plan, actual: Iterable[Activity], gpu: str | None
) -> tuple[Costs, str]:
    """Seconds of the plan's commands, and their source."""
    try:
        shape = model_shape(pipeline.model)
        unknown = _without_model(pipeline, gpu)
    except ValueError as error:
        shape, unknown = None, str(error)
    if shape is None or unknown:
        half = max(1, run.last_step // 2)
        measured = measured_costs(plan, [each for each in actual if 0 < each.step <= half])
        return measured, f"the times of the first half of its own steps (no cost model: {unknown})"
    name = gpu_named(gpu).name if gpu is not None else DEFAULT_GPU
    return PipelineCosts(pipeline, plan, shape, name, _known_lengths(run, pipeline)), "the cost model of `dagrl plan`"


def _known_lengths(run: RunRecord, pipeline: Pipeline) -> Assumed:
    """The mean length of responses; unknown if it is 0 or above `max_new_tokens`, which the cost model refuses."""
    lengths, found = run.of("response_tokens/mean"), list(pipeline.rollouts.values())
    # The metric is a mean over all rollouts.
    if not lengths or len(found) != 1 or not 0 < fmean(lengths) <= found[0].sampling.max_new_tokens:
        return Assumed()
    return Assumed(response_tokens=fmean(lengths))


def _without_model(pipeline: Pipeline, gpu: str | None) -> str:
    """The reason why the cost model does not know the pipeline's hardware; empty if it does."""
    if any(group.is_cpu for group in pipeline.groups.values()):
        return "it does not cover CPU slots"
    unnamed = [name for name, group in pipeline.groups.items() if not group.gpu]
    return "" if gpu or not unnamed else f"group {unnamed[0]} names no GPU (`--gpu NAME` does)"


class NodeSeconds(NamedTuple):
    """Busy seconds in a step of a node or of a move of an engine; None where there is none."""

    name: str
    executor: str
    planned: float | None
    actual: float | None


def node_seconds(planned: Planned, actual: Iterable[Activity], run: RunRecord) -> list[NodeSeconds]:
    """The nodes and moves of a step, the longest first; last the whole step, ``a step``."""
    seconds = [_seconds(planned.simulated.activities, planned.steps), _seconds(actual, planned.steps)]
    places = sorted(seconds[0] | seconds[1], key=lambda place: -max(each.get(place, 0.0) for each in seconds))
    rows = [NodeSeconds(*place, *(each.get(place) for each in seconds)) for place in places]
    steps = [line["time/step_s"] for line in run.steps if 0 < line["step"] <= planned.steps and line.get("time/step_s")]
    whole = [each for step, each in planned.simulated.step_seconds.items() if step > 0]
    return [*rows, NodeSeconds("a step", "", fmean(whole), fmean(steps) if steps else None)]


def group_idle(
    planned: Planned, actual: Iterable[Activity], run: RunRecord
) -> dict[str, tuple[float | None, float | None]]:
    """Group -> its share of idle time, planned and actual; None where it ran nothing."""
    simulated = planned.simulated
    shares = [
        idle_shares((each for each in simulated.activities if each.step <= planned.steps), simulated.step_seconds),
        idle_shares(actual, _step_seconds(run)),
    ]
    return {group: (shares[0].get(group), shares[1].get(group)) for group in shares[0] | shares[1]}


def _by_node(planned: Planned, actual: Iterable[Activity], run: RunRecord) -> RenderableType:
    rows = (
        [each.name, each.executor, *_compared(each.planned, each.actual)] for each in node_seconds(planned, actual, run)
    )
    return table(rows, headings=["node", "executor", "planned s", "actual s", "planned / actual"])


def _by_group(planned: Planned, actual: Iterable[Activity], run: RunRecord) -> RenderableType:
    rows = (
        [group, *("-" if share is None else f"{share:.0%}" for share in shares)]
        for group, shares in group_idle(planned, actual, run).items()
    )
    return table(rows, headings=["idle", "planned", "actual"])


def _seconds(activities: Iterable[Activity], steps: int) -> dict[tuple[str, str], float]:
    """(name, executor) -> mean seconds of a step."""
    spans: dict[tuple[str, str], dict[int, list[Activity]]] = defaultdict(lambda: defaultdict(list))
    for each in activities:
        if 0 < each.step <= steps:
            spans[each.name, each.executor][each.step].append(each)
    return {place: sum(map(busy_seconds, found.values())) / steps for place, found in spans.items()}


def _compared(planned: float | None, actual: float | None) -> list[str]:
    ratio = f"{planned / actual:.2f}" if planned is not None and actual else ""
    return [*("-" if each is None else f"{each:,.3f}" for each in (planned, actual)), ratio]


def _drawn(activities: Iterable[Activity], which: str = "", begin: float = 0.0) -> list[Activity]:
    """The activities as a trace shows them, `begin` seconds later; `which` is a suffix to the names of groups.

    A row of a trace holds one event at a time: activities of an executor that overlap go to several rows.
    """
    rows: dict[str, list[tuple[float, int]]] = defaultdict(list)
    drawn = []
    for each in sorted(activities, key=lambda activity: (activity.start, activity.end)):
        free = rows[each.executor]
        row = heappop(free)[1] if free and free[0][0] <= each.start else len(free)
        heappush(free, (each.end, row))
        group, worker = each.group + which, WorkerId(each.executor, row)
        drawn.append(each._replace(start=begin + each.start, end=begin + each.end, group=group, worker=worker))
    return drawn
