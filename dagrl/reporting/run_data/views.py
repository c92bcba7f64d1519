"""The actual course of a step: bars by worker, and the idle time of each group with its cause."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dagrl.reporting.comparison import Comparison, compare_with_plan
from dagrl.reporting.run_data.run_reader import RunReader, step_window
from dagrl.reporting.why.critical_path import Part, critical_path
from dagrl.scheduler.intervals import Activity, Interval, busy_seconds
from dagrl.scheduler.plan import HOST, Plan


def step_view(run: RunReader, step: int, plan: Plan | None = None) -> dict[str, object] | None:
    """The bars and pauses of a step, and its critical path if there is a `plan`; None if the timeline lacks the step.

    ``spans``: the `bar` of each activity in the window of the step, including overlapping steps; ``idle``: [group,
    start, seconds, cause]; ``path``: [name, executor, cause, start, seconds]. Starts are in seconds from the window's
    start.
    """
    window = run.window(step)
    if window is None:
        return None
    spans = run.within(window)
    pauses = [idle for group in run.groups if group != HOST for idle in idle_times(group, spans, window)]
    whole = window.end - window.start
    return {
        "step": step,
        "begin": window.start,
        "seconds": _rounded(whole),
        "spans": [bar(span, window.start) for span in spans],
        "idle": [
            [idle.group, _rounded(idle.start - window.start), _rounded(idle.seconds), idle.cause] for idle in pauses
        ],
        "path": [
            [part.name, part.executor, part.cause, _rounded(part.start - window.start), _rounded(part.end - part.start)]
            for part in _path(run, step, plan)
        ],
        "busy": {
            group: _rounded(whole and busy_seconds(span for span in spans if span.group == group) / whole)
            for group in run.groups
        },
    }


def bar(activity: Activity, begin: float) -> list[object]:
    """[name, group, worker, start, seconds, shard, step] of an activity, with its start in seconds from `begin`."""
    times = _rounded(activity.start - begin), _rounded(activity.end - activity.start)
    return [activity.name, activity.group, str(activity.worker), *times, activity.shard, activity.step]


def _path(run: RunReader, step: int, plan: Plan | None) -> list[Part]:
    interval = run.commit_interval(step)
    return critical_path(run.within(interval), interval, plan) if plan and interval else []


def _rounded(seconds: float) -> float:
    return round(seconds, 4)


DRIVER = "driver"
"""The cause of a pause in which no worker runs: the driver schedules, commits a step or starts."""
_SHORTEST_S = 1e-3
_TOLERANCE_S = 2e-3
"""Clocks of workers and driver differ by less than this."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A pause of a group, in seconds since the epoch."""

    group: str
    start: float
    end: float
    cause: str
    """``NODE (EXECUTOR)`` of an activity elsewhere, or `DRIVER`."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


def idle_times(group: str, spans: Sequence[Activity], window: Interval) -> list[Idle]:
    """The pauses of a group in a window, in order, each named after one cause; pauses below 1 ms are omitted.

    `spans` are the activities of all groups that overlap with the window. A group waits for the activity elsewhere that
    ends last before the pause does. Earlier parts of a pause are named after the activity that runs at that time.
    """
    own = [span for span in spans if span.group == group]
    others = [span for span in spans if span.group != group]
    idle: list[Idle] = []
    for pause in gaps(own, window):
        during = [span for span in others if span.start < pause.end and span.end > pause.start]
        borders = {pause.start, pause.end}
        borders |= {at for span in during for at in (span.start, span.end) if pause.start < at < pause.end}
        edges = sorted(borders)
        for start, end in pairwise(edges):
            cause = _cause(during, start, end, pause.end)
            if idle and idle[-1].cause == cause and idle[-1].end == start:
                idle[-1] = Idle(group, idle[-1].start, end, cause)
            else:
                idle.append(Idle(group, start, end, cause))
    return [pause for pause in idle if pause.seconds >= _SHORTEST_S]


def gaps(spans: Iterable[Activity], window: Interval) -> list[Interval]:
    """The parts of a window that no span covers, in order."""
    pauses, covered = [], window.start
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > covered:
            pauses.append(Interval(covered, min(span.start, window.end)))
        covered = max(covered, span.end)
    if covered < window.end:
        pauses.append(Interval(covered, window.end))
    return [gap for gap in pauses if gap.end > gap.start]


def _cause(during: Sequence[Activity], start: float, end: float, resumed: float) -> str:
    """The activity among those running from `start` to `end` for which the group waits until it has `resumed`."""
    active = [span for span in during if span.start <= start and span.end >= end]
    if not active:
        return DRIVER
    before = [span for span in active if span.end <= resumed + _TOLERANCE_S]
    cause = max(before or active, key=lambda span: span.end)
    return f"{cause.name} ({cause.executor})"


def plan_view(run: RunReader, gpu: str | None = None) -> dict[str, object]:
    """The comparison of `dagrl report --timeline`; ``error`` is the reason if there is none.

    ``nodes``: [name, executor, planned, actual] in seconds of a step; ``groups``: [name, planned, actual] as shares of
    idle time; ``spans`` of a planned step as in `step_view`.
    """
    try:
        comparison = compare_with_plan(run, gpu)
    except ValueError as error:
        return {"error": str(error)}
    return {
        "basis": comparison.basis,
        "steps": comparison.steps,
        "nodes": [list(node) for node in comparison.nodes()],
        "groups": [[group, *shares] for group, shares in comparison.idle().items()],
        "spans": _last_step(comparison),
    }


def _last_step(comparison: Comparison) -> list[list[object]]:
    """The bars of the last planned step, because earlier steps may include waits that occur once."""
    simulated, step = comparison.simulated, comparison.steps
    own = [activity for activity in simulated.activities if activity.step == step]
    if not own:
        return []
    window = step_window(own, simulated.step_seconds.get(step, 0.0))
    return [
        bar(activity, window.start)
        for activity in simulated.activities
        if activity.end > window.start and activity.start < window.end
    ]


_SPARSE = 0.5
"""A metric of few steps, such as of validations, is a list of places and a list of values."""


def metrics_table(run: RunReader, first: int = 0) -> dict[str, object]:
    """The steps from place `first` on: their numbers, the hours at which they ended, and a column for each metric.

    A column is a list with a value or None for each step, or ``{"at": places, "values": values}`` if most steps lack
    it; places count from 0 in this table. Numbers have six digits; NaN and infinity are None.
    """
    steps = run.steps[first:]
    numbers = [int(step["step"]) for step in steps]
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
