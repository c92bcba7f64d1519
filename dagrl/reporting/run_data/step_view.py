"""A step as it ran: bars by worker, and the idle time of each group with its cause."""

from __future__ import annotations

from typing import Any

from dagrl.reporting.run_data.idle import idle_times
from dagrl.reporting.run_data.run_reader import RunReader
from dagrl.reporting.why.critical_path import Part, critical_path
from dagrl.scheduler.intervals import Activity, busy_seconds
from dagrl.scheduler.plan import HOST, Plan


def step_view(run: RunReader, step: int, plan: Plan | None = None) -> dict[str, Any] | None:
    """The bars and pauses of a step, and its critical path if there is a `plan`; None if the timeline lacks the step.

    ``spans``: the `bar` of each activity in the window of the step, also of steps that overlap with it; ``idle``:
    [group, start, seconds, cause]; ``path``: [name, executor, cause, start, seconds]. Starts are in seconds from the
    window's.
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


def bar(activity: Activity, begin: float) -> list[Any]:
    """[name, group, worker, start, seconds, shard, step] of an activity, with its start in seconds from `begin`."""
    times = _rounded(activity.start - begin), _rounded(activity.end - activity.start)
    return [activity.name, activity.group, str(activity.worker), *times, activity.shard, activity.step]


def _path(run: RunReader, step: int, plan: Plan | None) -> list[Part]:
    interval = run.commit_interval(step)
    return critical_path(run.within(interval), interval, plan) if plan and interval else []


def _rounded(seconds: float) -> float:
    """To a tenth of a millisecond."""
    return round(seconds, 4)
