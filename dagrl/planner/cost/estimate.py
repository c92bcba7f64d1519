"""A step of a plan: seconds of each node and of the step, idle GPUs, and bytes on the edges.

The step's time is not a sum: the costs drive the plan's own scheduler, and steps are measured in its steady state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose

from dagrl.graph.offline import is_offline
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.cost.edges import edge_bytes
from dagrl.planner.simulation.simulate import simulate
from dagrl.scheduler.intervals import Interval, busy_seconds
from dagrl.scheduler.plan import Rows

_WARM_UP = 2
"""Simulated steps before the measured ones, besides the staleness of the plan: engines start awake or asleep."""
_STEADY = 3
_TURNS = 6
"""Turns that are simulated if an engine that is awake works on as many steps as it may: with several engines the turns
take some time to repeat."""
_OF_ENGINES = ("sleep", "wake")


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """A step in the steady state, without validation and checkpoints."""

    step_s: float
    """From one step's end to the next one's."""
    node_s: Mapping[str, float]
    """Task -> seconds in which at least one of its shards is in work."""
    move_s: Mapping[str, float]
    """``sync``, ``sleep ENGINE`` and ``wake ENGINE`` -> seconds of a step."""
    idle: Mapping[str, float]
    """Group -> share of the time in which no engine of it works."""
    edge_bytes: Mapping[tuple[str, str], float]
    """(writer, reader) -> bytes of a step."""
    response_tokens: float
    """Tokens that a step samples, or learns from if it samples none."""


def estimate_step(costs: PipelineCosts) -> StepEstimate:
    """Estimate a step of the costs' plan."""
    plan = costs.plan
    together = plan.max_staleness + 1
    in_turns = together > 1 and any(executor.sleeps for executor in plan.executors.values())
    last = _WARM_UP + (_TURNS * together if in_turns else plan.max_staleness + _STEADY)
    # The last step of a run is saved, and the last ones start no further ones early: none of those is measured.
    steady = replace(plan, steps=last + together, save_every=None, validate_every=None, validate_first=False)
    simulated = simulate(steady, costs, last)
    added = [simulated.step_seconds[step] for step in range(1, last + 1)]
    steady_steps = _alike(added, together) if in_turns else _STEADY
    first = last - steady_steps
    step_s = sum(added[first:]) / steady_steps
    begin, end = simulated.seconds - step_s * steady_steps, simulated.seconds
    named, by_group = defaultdict(list), defaultdict(list)
    for each in simulated.activities:
        if first < each.step <= last:
            name = f"{each.name} {each.executor}" if each.category in _OF_ENGINES else each.name
            named[name].append(Interval(each.start, each.end))
    # The work of a step overlaps with the end of the one before.
    for each in (*simulated.activities, *simulated.under_way):
        if each.end > begin:
            by_group[each.group].append(Interval(max(each.start, begin), min(each.end, end)))
    seconds = {name: busy_seconds(spans) / steady_steps for name, spans in named.items()}
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


def _alike(seconds: Sequence[float], least: int) -> int:
    """Return after how many steps, `least` or more, everything repeats itself."""
    for count in range(least, len(seconds) // 2 + 1):
        if all(
            isclose(*pair, rel_tol=1e-3) for pair in zip(seconds[-count:], seconds[-2 * count : -count], strict=True)
        ):
            return count
    return len(seconds) // 2


def _edges(costs: PipelineCosts) -> dict[tuple[str, str], float]:
    tasks = {task.name: task for task in costs.plan.tasks}
    found = {}
    for task in tasks.values():
        if task.rows is Rows.TRAIN:
            taken = edge_bytes(tasks, task, costs.rows(task), costs.lengths(task), costs.shape)
            rounds = costs.plan.rounds_of(task)
            found.update({(producer, task.name): rounds * nbytes for producer, nbytes in taken.items()})
    return found
