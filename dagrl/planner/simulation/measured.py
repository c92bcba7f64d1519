"""Costs out of what was measured: a run's own seconds, to be simulated by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from dagrl.planner.simulation.costs import CostTable
from dagrl.planner.simulation.simulate import Activity
from dagrl.scheduler.commands import Command, Commit, Run, Sync
from dagrl.scheduler.intervals import Interval, busy_seconds
from dagrl.scheduler.plan import Plan


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """See `dagrl.planner.simulation.costs.Costs`. What was never measured takes no time."""

    runs: CostTable
    others: Mapping[tuple[str, str], float]
    """Kind of command and executor -> seconds; a sync is its follower's."""

    def seconds(self, command: Command) -> float:
        """How long `command` takes."""
        if isinstance(command, Run | Commit):
            return self.runs.seconds(command)
        executor = command.follower if isinstance(command, Sync) else command.executor
        return self.others.get((type(command).__name__.lower(), executor), 0.0)

    def shard_offsets(self, run: Run) -> Sequence[float]:
        """One shard after the other."""
        return self.runs.shard_offsets(run)


def measured_costs(plan: Plan, activities: Iterable[Activity]) -> MeasuredCosts:
    """The median step's seconds of each task, shared out evenly among its shards; of all else, the mean.

    A median, for a run's first step takes longer than the others.
    """
    tasks = {task.name: task for task in plan.tasks}
    steps: dict[str, dict[int, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    others: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in activities:
        if each.name in tasks:
            steps[each.name][each.step].append(Interval(each.start, each.end))
        else:
            others[each.name, each.executor].append(each.end - each.start)
    shard = {
        name: median(
            busy_seconds(spans) if tasks[name].streams else sum(span.end - span.start for span in spans)
            for spans in found.values()
        )
        / (plan.shards * plan.rounds_of(tasks[name]))
        for name, found in steps.items()
    }
    return MeasuredCosts(CostTable(shard), {place: fmean(seconds) for place, seconds in others.items()})
