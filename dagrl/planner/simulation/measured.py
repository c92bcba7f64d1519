"""Costs from the measured seconds of a run, for a simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from dagrl.planner.simulation.costs import CostTable
from dagrl.scheduler.commands import Command, Commit, Run, Sync
from dagrl.scheduler.intervals import Activity, Interval, busy_seconds
from dagrl.scheduler.plan import Plan


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """See `dagrl.planner.simulation.costs.Costs`. Commands that were never measured take no time."""

    runs: CostTable
    others: Mapping[tuple[str, str], float]
    """Kind of command and executor -> seconds; the executor of a sync is its receiver."""

    def seconds(self, command: Command) -> float:
        if isinstance(command, Run | Commit):
            return self.runs.seconds(command)
        executor = command.follower if isinstance(command, Sync) else command.executor
        return self.others.get((type(command).__name__.lower(), executor), 0.0)

    def shard_offsets(self, run: Run) -> Sequence[float]:
        return self.runs.shard_offsets(run)


def measured_costs(plan: Plan, activities: Iterable[Activity]) -> MeasuredCosts:
    """Return the median step's seconds of each task, divided evenly among its shards, and means of all else.

    It is a median because the first step of a run takes longer than the others.
    """
    tasks = {task.name: task for task in plan.tasks}
    steps: dict[str, dict[int, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    others: dict[tuple[str, str], list[float]] = defaultdict(list)
    for activity in activities:
        if activity.name in tasks:
            steps[activity.name][activity.step].append(Interval(activity.start, activity.end))
        else:
            others[activity.name, activity.executor].append(activity.end - activity.start)
    shard = {
        name: median(
            busy_seconds(spans) if tasks[name].streams else sum(span.end - span.start for span in spans)
            for spans in by_step.values()
        )
        / (plan.shards * plan.rounds_of(tasks[name]))
        for name, by_step in steps.items()
    }
    return MeasuredCosts(CostTable(shard), {place: fmean(seconds) for place, seconds in others.items()})
