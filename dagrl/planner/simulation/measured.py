"""Measured seconds of a step's work, and the costs of a simulation by them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from dagrl.planner.simulation.costs import CostTable
from dagrl.scheduler.commands import Command, Commit, Run, Sync
from dagrl.scheduler.intervals import Activity, busy_seconds
from dagrl.scheduler.plan import Plan


class Work(NamedTuple):
    """A task, or a kind of move: ``sync``, ``sleep``, ``wake``, ``save``, ``restart``."""

    name: str
    executor: str
    """The receiver of a sync."""


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """See `dagrl.planner.simulation.costs.Costs`. Commands that were never measured take no time."""

    runs: CostTable
    moves: Mapping[Work, float]

    def seconds(self, command: Command) -> float:
        if isinstance(command, Run | Commit):
            return self.runs.seconds(command)
        executor = command.follower if isinstance(command, Sync) else command.executor
        return self.moves.get(Work(type(command).__name__.lower(), executor), 0.0)

    def shard_offsets(self, run: Run) -> Sequence[float]:
        return self.runs.shard_offsets(run)


def seconds_of_step(plan: Plan, activities: Iterable[Activity]) -> dict[Work, float]:
    """Median seconds of each work in a step, of the steps that have it.

    Shards of a task that streams run at the same time; those of others each have a worker for themselves.
    """
    streams = {task.name for task in plan.tasks if task.streams}
    by_work: dict[Work, dict[int, list[Activity]]] = defaultdict(lambda: defaultdict(list))
    for activity in activities:
        by_work[Work(activity.name, activity.executor)][activity.step].append(activity)
    return {
        work: median(
            busy_seconds(spans) if work.name in streams else sum(span.end - span.start for span in spans)
            for spans in steps.values()
        )
        for work, steps in by_work.items()
    }


def measured_costs(plan: Plan, activities: Iterable[Activity]) -> MeasuredCosts:
    """The median step's seconds of each task, divided evenly among its shards, and means of moves.

    It is a median because the first step of a run takes longer than the others.
    """
    tasks = {task.name: task for task in plan.tasks}
    runs, moves = [], defaultdict(list)
    for activity in activities:
        if activity.name in tasks:
            runs.append(activity)
        else:
            moves[Work(activity.name, activity.executor)].append(activity.end - activity.start)
    shard = {
        work.name: seconds / (plan.shards * plan.rounds_of(tasks[work.name]))
        for work, seconds in seconds_of_step(plan, runs).items()
    }
    return MeasuredCosts(CostTable(shard), {work: fmean(seconds) for work, seconds in moves.items()})
