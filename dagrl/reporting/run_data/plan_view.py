"""The plan beside the run: seconds of nodes, idle groups, and a step as it was planned."""

from __future__ import annotations

from typing import Any

from dagrl.reporting.comparison import Comparison, compare_with_plan
from dagrl.reporting.run_data.run_reader import RunReader, step_window
from dagrl.reporting.run_data.step_view import bar


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


def _last_step(comparison: Comparison) -> list[list[Any]]:
    """The bars of the last planned step: those before it may wait for things that happen once."""
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
