"""The plan beside the run: seconds of nodes, idle groups, and a step as it was planned."""

from __future__ import annotations

from typing import Any

from dagrl.reporting.comparison import Comparison, compare_with_plan
from dagrl.reporting.run_data.run_reader import RunReader
from dagrl.scheduler.plan import HOST


def plan_view(run: RunReader, gpu: str | None = None) -> dict[str, Any]:
    """The comparison of `dagrl report --timeline`; ``error`` says why there is none.

    ``nodes``: [name, executor, planned, actual] in seconds of a step; ``groups``: [name, planned, actual] as shares of
    idle time; ``spans`` of a planned step as those of `step_view`.
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


def _last_step(planned: Comparison) -> list[list[Any]]:
    """The bars of the last planned step: those before it may wait for things that happen once."""
    step = planned.steps
    own = [activity for activity in planned.simulated.activities if activity.step == step]
    if not own:
        return []
    end = max(activity.end for activity in own)
    starts = [activity.start for activity in own if activity.group != HOST] or [activity.start for activity in own]
    start = min(min(starts), end - planned.simulated.step_seconds.get(step, 0.0))
    return [
        [
            activity.name,
            activity.group,
            str(activity.worker),
            activity.start - start,
            activity.end - activity.start,
            activity.shard,
            activity.step,
        ]
        for activity in planned.simulated.activities
        if activity.end > start and activity.start < end
    ]
