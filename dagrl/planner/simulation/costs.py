"""Seconds of commands: the interface that a simulation needs, a table, and costs by the times of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple, Protocol

from dagrl.scheduler.commands import Command, Commit, Restart, Run, Save, Sleep, Sync, Wake
from dagrl.scheduler.intervals import Activity, busy_seconds
from dagrl.scheduler.plan import Plan


class Costs(Protocol):
    """Seconds of the scheduler's commands."""

    def seconds(self, command: Command) -> float:
        """Return the seconds of `command`; never negative."""

    def shard_offsets(self, run: Run) -> Sequence[float]:
        """Return the end of each of `run.shards` of a task that streams, in seconds after the start of the run.

        Ascending, in the order of `run.shards`; the last is ``seconds(run)``.
        """


@dataclass(frozen=True, slots=True)
class CostTable:
    """Fixed seconds: the same in every step, and for every executor."""

    shard: Mapping[str, float] = field(default_factory=dict)
    """Task -> seconds of each shard of a run; other tasks take no time."""
    sync: float = 0.0
    sleep: float = 0.0
    wake: float = 0.0
    restart: float = 0.0
    save: float = 0.0
    commit: float = 0.0

    def seconds(self, command: Command) -> float:
        if isinstance(command, Run):
            return self.shard.get(command.task, 0.0) * len(command.shards)
        seconds: float = getattr(self, type(command).__name__.lower())
        return seconds

    def shard_offsets(self, run: Run) -> Sequence[float]:
        return [self.shard.get(run.task, 0.0) * count for count in range(1, len(run.shards) + 1)]


class Work(NamedTuple):
    """A task, or a kind of move: ``sync``, ``sleep``, ``wake``, ``save``, ``restart``."""

    name: str
    executor: str
    """The receiver of a sync."""


def move_of(command: Sync | Sleep | Wake | Restart | Save) -> Work:
    executor = command.follower if isinstance(command, Sync) else command.executor
    return Work(type(command).__name__.lower(), executor)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """See `Costs`. Commands that were never measured take no time."""

    runs: CostTable
    moves: Mapping[Work, float]

    def seconds(self, command: Command) -> float:
        if isinstance(command, Run | Commit):
            return self.runs.seconds(command)
        return self.moves.get(move_of(command), 0.0)

    def shard_offsets(self, run: Run) -> Sequence[float]:
        return self.runs.shard_offsets(run)


def seconds_of_step(plan: Plan, activities: Iterable[Activity]) -> dict[Work, float]:
    """Median seconds of each work, over the steps that have it.

    Shards of a streaming task run at the same time; each shard of other tasks has its own worker.
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
