"""Summarizes a run, compares it with its plan, and writes both as Chrome traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from heapq import heappop, heappush
from pathlib import Path

from dagrl.backends.planning.gpus import gpu_named
from dagrl.config.errors import counted
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.cost.lengths import Assumed
from dagrl.planner.showing.report import Report
from dagrl.planner.simulation.simulate import simulate
from dagrl.reporting.comparison import compare_with_plan, idle_shares
from dagrl.reporting.run_data.run_reader import RunReader, read_run
from dagrl.reporting.summary import summary, summary_values
from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import WorkerId
from dagrl.tables import render, table
from dagrl.tracking.timeline import write_trace

TRACE = "timeline_planned.json"
_TRACED_STEPS = 4
"""Steps in the trace of a plan, and one more for each step that may overlap."""


def report_run(folder: Path, *, timeline: bool = False, gpu: str | None = None) -> str:
    """Summarize a run; with `timeline` compare it with its plan, and write both as a trace in the folder.

    `gpu` is the GPU of groups that name none. ValueError if there is no run, or no basis for a plan; PipelineError if
    `pipeline.yaml` of the folder is wrong and needed.
    """
    if gpu is not None:
        gpu = gpu_named(gpu).name
    run = read_run(folder)
    parts = summary(run, _idle_in_training(run), run.known_steps)
    if not timeline:
        return render(parts)
    comparison = compare_with_plan(run, gpu)
    trace = folder / TRACE
    begin = min(activity.start for activity in comparison.actual)
    drawn = f"{trace}: both, to be opened in ui.perfetto.dev"
    try:
        planned = _drawn(comparison.simulated.activities, " (planned)", begin)
        write_trace(trace, [*planned, *_drawn(comparison.actual, " (actual)")])
    except OSError as error:
        # The folder may be another user's, and the tables do not need the traces.
        drawn = f"no trace: {error}"
    nodes = ([node.name, node.executor, *_compared(node.planned, node.actual)] for node in comparison.nodes())
    groups = (
        [group, *("-" if share is None else f"{share:.0%}" for share in shares)]
        for group, shares in comparison.idle().items()
    )
    return render(
        [
            *parts,
            "",
            f"planned beside actual, steps 1 to {comparison.steps}; planned by {comparison.basis}",
            "",
            table(nodes, headings=["node", "executor", "planned s", "actual s", "planned / actual"]),
            "",
            table(groups, headings=["idle", "planned", "actual"]),
            "",
            f"  {drawn}",
        ]
    )


def run_values(folder: Path) -> dict[str, object]:
    """Summarize a run as plain values. ValueError if there is no run."""
    run = read_run(folder)
    return summary_values(run, run.known_steps) | {"idle": _idle_in_training(run)}


def write_planned(report: Report, path: Path, assumed: Assumed) -> str:
    """Write the first steps of a plan that fits as a trace, and describe it in a line. OSError, ValueError."""
    plan = report.fit.plan
    costs = PipelineCosts(report.pipeline, plan, report.fit.shape, report.gpu, assumed)
    steps = min(plan.steps, _TRACED_STEPS + plan.max_staleness)
    simulated = simulate(plan, costs, steps)
    write_trace(path, _drawn(simulated.activities))
    return f"{path}: {counted(steps, 'step')} as planned, {simulated.seconds:,.1f} s; open it in ui.perfetto.dev"


def _idle_in_training(run: RunReader) -> dict[str, float]:
    return idle_shares((activity for activity in run.spans if activity.step > 0), run.step_seconds)


def _compared(planned: float | None, actual: float | None) -> list[str]:
    ratio = f"{planned / actual:.2f}" if planned is not None and actual else ""
    return [*("-" if value is None else f"{value:,.3f}" for value in (planned, actual)), ratio]


def _drawn(activities: Iterable[Activity], which: str = "", begin: float = 0.0) -> list[Activity]:
    """The activities for a trace, `begin` seconds later; `which` is a suffix to the names of groups.

    A row of a trace holds one event at a time: activities of an executor that overlap go to several rows.
    """
    rows: dict[str, list[tuple[float, int]]] = defaultdict(list)
    drawn = []
    for activity in sorted(activities, key=lambda activity: (activity.start, activity.end)):
        free = rows[activity.executor]
        row = heappop(free)[1] if free and free[0][0] <= activity.start else len(free)
        heappush(free, (activity.end, row))
        group, worker = activity.group + which, WorkerId(activity.executor, row)
        drawn.append(
            activity._replace(start=begin + activity.start, end=begin + activity.end, group=group, worker=worker)
        )
    return drawn
