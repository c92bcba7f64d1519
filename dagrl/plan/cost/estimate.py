"""What a step of a plan will take: seconds of each node, of the step, idle GPUs, and bytes along the edges.

The step's time is not a sum: the plan's own scheduler is driven by the costs, and its steps are looked at once they
follow each other evenly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dagrl.plan.cost.costs import PipelineCosts
from dagrl.plan.cost.edges import edge_bytes
from dagrl.plan.intervals import Interval, busy_seconds
from dagrl.plan.plan import Rows
from dagrl.plan.simulation.simulate import simulate
from dagrl.spec.offline import is_offline

_WARM_UP = 2
"""Simulated steps before those that are looked at, beside the staleness of the plan: engines start awake or asleep."""
_STEADY = 3
_OF_ENGINES = ("sleep", "wake")


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """A step in the steady state, without validation and checkpoints."""

    step_s: float
    """From one step's end to the next one's."""
    node_s: Mapping[str, float]
    """Task -> seconds in which at least one of its shards is worked on."""
    move_s: Mapping[str, float]
    """``sync``, ``sleep`` and ``wake``, with the engine's name behind the last two -> seconds of all of a step."""
    idle: Mapping[str, float]
    """Group -> share of the time in which none of its engines has anything to do."""
    edge_bytes: Mapping[tuple[str, str], float]
    """(writer, reader) -> bytes of a step."""
    response_tokens: float
    """Tokens sampled in a step, or learned from where none are."""


def estimate_step(costs: PipelineCosts) -> StepEstimate:
    """The estimate of the costs' plan."""
    plan = costs.plan
    first = _WARM_UP + plan.max_staleness
    last = first + _STEADY
    # The run's last step is saved, and none of those that are looked at.
    steady = replace(plan, steps=last + 1, save_every=None, validate_every=None, validate_first=False)
    simulated = simulate(steady, costs, last)
    step_s = sum(simulated.step_seconds[step] for step in range(first + 1, last + 1)) / _STEADY
    begin, end = simulated.seconds - step_s * _STEADY, simulated.seconds
    named, by_group = defaultdict(list), defaultdict(list)
    for each in simulated.activities:
        if first < each.step <= last:
            name = f"{each.name} {each.executor}" if each.category in _OF_ENGINES else each.name
            named[name].append(Interval(each.start, each.end))
    # A step's work goes on beside the end of the one before.
    for each in (*simulated.activities, *simulated.under_way):
        if each.end > begin:
            by_group[each.group].append(Interval(max(each.start, begin), min(each.end, end)))
    seconds = {name: busy_seconds(spans) / _STEADY for name, spans in named.items()}
    tasks = {task.name for task in plan.tasks}
    return StepEstimate(
        step_s=step_s,
        node_s={task.name: seconds[task.name] for task in plan.tasks if task.name in seconds},
        move_s={name: took for name, took in sorted(seconds.items()) if name not in tasks},
        idle={group: 1 - busy_seconds(by_group[group]) / (end - begin) for group in costs.pipeline.groups},
        edge_bytes=_edges(costs),
        response_tokens=sum(
            costs.rows(task) * plan.rounds_of(task) * costs.lengths(task).response
            for task in plan.tasks
            if task.rows is Rows.TRAIN and (task.trains if is_offline(costs.pipeline) else task.generates)
        ),
    )


def _edges(costs: PipelineCosts) -> dict[tuple[str, str], float]:
    tasks = {task.name: task for task in costs.plan.tasks}
    found = {}
    for task in tasks.values():
        if task.rows is Rows.TRAIN:
            taken = edge_bytes(tasks, task, costs.rows(task), costs.lengths(task), costs.shape)
            rounds = costs.plan.rounds_of(task)
            found.update({(producer, task.name): rounds * nbytes for producer, nbytes in taken.items()})
    return found
