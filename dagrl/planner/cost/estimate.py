"""A step of a plan: seconds of each node and of the step, idle GPUs, and bytes on the edges.

The step's time is not a sum: the costs drive the plan's own scheduler, and steps are measured in its steady state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose

import numpy as np

from dagrl.backends.families.registry import engine_shape
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.planning.decoding import Lengths
from dagrl.config.columns import CORE_COLUMNS, IMAGE_COLUMNS, ColumnSpec, Shape
from dagrl.config.schema import LogprobNode
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.simulation.costs import Costs
from dagrl.planner.simulation.simulate import Simulated, simulate
from dagrl.scheduler.intervals import Activity, Interval, busy_seconds
from dagrl.scheduler.plan import Plan, Rows

_WARM_UP = 2
"""Simulated steps before the measured ones, besides the staleness of the plan: engines start awake or asleep."""
_STEADY = 3
_TURNS = 6
"""Number of simulated turns if awake engines work on as many steps as allowed: with several engines, turns repeat only
after some time."""
_OF_ENGINES = ("sleep", "wake")
_OFFSET_BYTES = 8
"""The offset of each row of a ragged column."""
_COLOURS = 3
_TEXT_BYTES = 64
"""A text, such as a reference answer."""
_UNKNOWN_BYTES = 4
"""A user's own column: one float32 for each row."""


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """A step in the steady state, without validation and checkpoints."""

    step_s: float
    """Seconds from one step's end to the next; including the driver's time if a run calibrates the costs."""
    node_s: Mapping[str, float]
    """Task -> seconds in which at least one of its shards is running."""
    move_s: Mapping[str, float]
    """``sync``, ``sleep ENGINE`` and ``wake ENGINE`` -> seconds of a step."""
    idle: Mapping[str, float]
    """Group -> share of the time in which no engine of it works."""
    edge_bytes: Mapping[tuple[str, str], float]
    """(writer, reader) -> bytes of a step."""
    response_tokens: float
    """Tokens that a step samples, or learns from if it samples none."""


def estimate_step(costs: PipelineCosts) -> StepEstimate:
    plan = costs.plan
    simulated, steady_steps = _simulated(plan, costs)
    last = max(simulated.step_seconds)
    first = last - steady_steps
    step_s = sum(simulated.step_seconds[step] for step in range(first + 1, last + 1)) / steady_steps
    begin, end = simulated.seconds - step_s * steady_steps, simulated.seconds
    named, by_group = defaultdict(list), defaultdict(list)
    for activity in simulated.activities:
        if first < activity.step <= last:
            name = f"{activity.name} {activity.executor}" if activity.category in _OF_ENGINES else activity.name
            named[name].append(activity)
    # The work of a step overlaps with the end of the previous step.
    for activity in (*simulated.activities, *simulated.under_way):
        if activity.end > begin:
            by_group[activity.group].append(Interval(max(activity.start, begin), min(activity.end, end)))
    seconds = {name: busy_seconds(spans) / steady_steps for name, spans in named.items()}
    tasks = {task.name for task in plan.tasks}
    sampling = [] if costs.pipeline.is_offline else [task for task in plan.tasks if task.generates]
    return StepEstimate(
        step_s=step_s + costs.calibration.driver_s,
        node_s={task.name: seconds[task.name] for task in plan.tasks if task.name in seconds},
        move_s={name: took for name, took in sorted(seconds.items()) if name not in tasks},
        idle={group: 1 - busy_seconds(by_group[group]) / (end - begin) for group in costs.pipeline.groups},
        edge_bytes=_edges(costs),
        response_tokens=sum(
            costs.rows(task) * plan.rounds_of(task) * costs.lengths(task).response
            for task in sampling or [task for task in plan.tasks if task.trains]
            if task.rows is Rows.TRAIN
        ),
    )


def steady_activities(plan: Plan, costs: Costs) -> list[Activity]:
    """Simulate steps without validation and checkpoints, and return all of the steady ones."""
    simulated, steady = _simulated(plan, costs)
    last = max(simulated.step_seconds)
    return [activity for activity in simulated.activities if last - steady < activity.step <= last]


def _simulated(plan: Plan, costs: Costs) -> tuple[Simulated, int]:
    """Simulate steps up to a steady state; also returns the number of last steps in it."""
    together = plan.max_staleness + 1
    in_turns = together > 1 and any(executor.sleeps for executor in plan.executors.values())
    last = _WARM_UP + (_TURNS * together if in_turns else plan.max_staleness + _STEADY)
    # The last step of a run is saved, and the last ones start no further ones early: none of those is measured.
    steady = replace(plan, steps=last + together, save_every=None, validate_every=None, validate_first=False)
    simulated = simulate(steady, costs, last)
    added = [simulated.step_seconds[step] for step in range(1, last + 1)]
    return simulated, _alike(added, together) if in_turns else _STEADY


def _alike(seconds: Sequence[float], least: int) -> int:
    """Return the period of the simulation in steps, at least `least`."""
    for count in range(least, len(seconds) // 2 + 1):
        if all(
            isclose(*pair, rel_tol=1e-3) for pair in zip(seconds[-count:], seconds[-2 * count : -count], strict=True)
        ):
            return count
    return len(seconds) // 2


def _edges(costs: PipelineCosts) -> dict[tuple[str, str], float]:
    """(writer, reader) -> bytes of a step."""
    tasks = {task.name: task for task in costs.plan.tasks}
    # An upper bound: the most of any node.
    nodes = costs.pipeline.nodes.values()
    scorers = [node for node in nodes if isinstance(node, LogprobNode)]
    top_k = max((node.top_k or 0 for node in scorers), default=0)
    teachers = [str(node.engine) for node in scorers if node.hidden_states]
    width = max((engine_shape(costs.pipeline, name, costs.shape).hidden for name in teachers), default=0)
    edges: dict[tuple[str, str], float] = defaultdict(float)
    for task in tasks.values():
        if task.rows is not Rows.TRAIN:
            continue
        rows = costs.rows(task) * costs.plan.rounds_of(task)
        for producer, column in dict.fromkeys(task.inputs.values()):
            # Contracts have the op's name of a column.
            names = {there: own for own, there in tasks[producer].outputs.items()}
            spec = CORE_COLUMNS.get(names.get(column, column))
            edges[producer, task.name] += rows * _row_bytes(spec, costs.lengths(task), costs.shape, top_k, width)
    return edges


def _row_bytes(column: ColumnSpec | None, lengths: Lengths, shape: ModelShape, top_k: int, width: int) -> float:
    if column is None:
        return _UNKNOWN_BYTES
    item_bytes = np.dtype(column.dtype).itemsize
    match column.shape:
        case Shape.SAMPLE:
            return item_bytes
        case Shape.PROMPT:
            return item_bytes * lengths.prompt + _OFFSET_BYTES
        case Shape.RESPONSE:
            return item_bytes * lengths.response + _OFFSET_BYTES
        case Shape.TOPK:
            return item_bytes * lengths.response * top_k + _OFFSET_BYTES
        case Shape.HIDDEN:
            return item_bytes * lengths.response * width + _OFFSET_BYTES
        case Shape.TEXT:
            return _TEXT_BYTES + _OFFSET_BYTES
        case Shape.ROUTES:
            chosen = shape.experts.chosen if shape.experts else 0
            return item_bytes * (lengths.row - 1) * shape.layers * chosen + _OFFSET_BYTES
        case Shape.IMAGES:
            # At most: a prompt of images alone. Samples of a prompt that go to one rank share them.
            seen = shape.vision if column.name == IMAGE_COLUMNS[0] else None
            side = seen.patch * seen.merge if seen else 0
            return _COLOURS * side * side * lengths.prompt + _OFFSET_BYTES
    raise AssertionError(f"no size of a {column.shape} column")
