"""The plan beside the run: seconds of nodes, idle groups, and a step as it was planned."""

from __future__ import annotations

from typing import Any

from dagrl.config.errors import PipelineError
from dagrl.reporting.run_data.overview import pipeline_of
from dagrl.reporting.run_data.run_reader import RunReader
from dagrl.reporting.run_report import Planned, group_idle, node_seconds, plan_again
from dagrl.scheduler.plan import HOST


def plan_view(run: RunReader, gpu: str | None = None) -> dict[str, Any]:
    """The comparison of `dagrl report --timeline`; ``error`` says why there is none.

    ``nodes``: [name, executor, planned, actual] in seconds of a step; ``groups``: [name, planned, actual] as shares of
    idle time; ``spans`` of a planned step as those of `step_view`.
    """
    loaded = pipeline_of(run.folder)
    if isinstance(loaded, str):
        return {"error": loaded}
    record = run.record()
    actual = record.spans
    if not record.last_step or not actual:
        return {"error": "no step with a timeline is finished yet"}
    try:
        planned = plan_again(record, loaded, actual, gpu)
    except (PipelineError, ValueError) as error:
        return {"error": str(error)}
    actual = [each for each in actual if 0 < each.step <= planned.steps]
    return {
        "basis": planned.basis,
        "steps": planned.steps,
        "nodes": [list(each) for each in node_seconds(planned, actual, record)],
        "groups": [[group, *shares] for group, shares in group_idle(planned, actual, record).items()],
        "spans": _last_step(planned),
    }


def _last_step(planned: Planned) -> list[list[Any]]:
    """The bars of the last planned step: those before it may wait for things that happen once."""
    step = planned.steps
    own = [each for each in planned.simulated.activities if each.step == step]
    if not own:
        return []
    end = max(each.end for each in own)
    starts = [each.start for each in own if each.group != HOST] or [each.start for each in own]
    start = min(min(starts), end - planned.simulated.step_seconds.get(step, 0.0))
    return [
        [each.name, each.group, str(each.worker), each.start - start, each.end - each.start, each.shard, each.step]
        for each in planned.simulated.activities
        if each.end > start and each.start < end
    ]
