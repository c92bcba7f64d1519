"""A step as it ran: bars by worker, and the idle time of each group with its cause."""

from __future__ import annotations

from typing import Any

from dagrl.reporting.run_data.idle import idle_times
from dagrl.reporting.run_data.run_reader import RunReader
from dagrl.scheduler.intervals import busy_seconds
from dagrl.scheduler.plan import HOST


def step_view(run: RunReader, step: int) -> dict[str, Any] | None:
    """The bars and pauses of a step; None if the timeline lacks it.

    ``spans``: [name, group, worker, start, seconds, shard, step] of all activities in the window of the step, also
    those of steps that overlap with it; ``idle``: [group, start, seconds, cause]. Starts are in seconds from the
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
        "spans": [
            [
                span.name,
                span.group,
                span.worker,
                _rounded(span.start - window.start),
                _rounded(span.end - span.start),
                span.shard,
                span.step,
            ]
            for span in spans
        ],
        "idle": [
            [idle.group, _rounded(idle.start - window.start), _rounded(idle.seconds), idle.cause] for idle in pauses
        ],
        "busy": {
            group: _rounded(whole and busy_seconds(span for span in spans if span.group == group) / whole)
            for group in run.groups
        },
    }


def _rounded(seconds: float) -> float:
    """To a tenth of a millisecond."""
    return round(seconds, 4)
