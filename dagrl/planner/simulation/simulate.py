"""Simulates a run: the costs of commands drive its scheduler, instead of workers.

The simulation is deterministic. Events at the same time are in the order in which their commands began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from dagrl.planner.simulation.costs import Costs, move_of
from dagrl.scheduler.commands import (
    BatchShort,
    Command,
    CommandDone,
    Commit,
    Event,
    Restart,
    Run,
    Save,
    ShardDone,
    Sleep,
    Sync,
    Wake,
)
from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import HOST, Plan, WorkerId
from dagrl.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulation."""

    activities: tuple[Activity, ...]
    """Commands that had ended when the last step was committed, in the order of their ends."""
    under_way: tuple[Activity, ...]
    """Commands in progress at that time, with their expected ends."""
    step_seconds: dict[int, float]
    """Step -> seconds from the previous commit to its own."""
    seconds: float
    """From the start of the first step to the commit of the last."""


def simulate(plan: Plan, costs: Costs, steps: int) -> Simulated:
    """Simulate the first `steps` of a run. Later steps also start, and are cut off."""
    assert 1 <= steps <= plan.steps, f"{steps} steps of a plan for {plan.steps}"
    simulation = _Simulation(plan, costs)
    simulation.go_on_until(steps)
    return simulation.seen()


class _Simulation:
    def __init__(self, plan: Plan, costs: Costs) -> None:
        self._plan, self._costs = plan, costs
        self._scheduler = Scheduler(plan)
        self._now = 0.0
        self._task_of = {task.name: task for task in plan.tasks}
        self._places = {name: (executor.group or HOST, WorkerId(name, 0)) for name, executor in plan.executors.items()}
        """Executor -> group and first worker."""
        self._through = dict.fromkeys(plan.executors, 0.0)
        """Time at which each executor finishes its runs and syncs; not for the host, where runs overlap."""
        self._coming: list[tuple[float, int, float, Command, Event]] = []
        """Heap of future events: time, order, start, command, event."""
        self._order = count()
        self._activities: list[Activity] = []
        self._commits: dict[int, float] = {}

    def go_on_until(self, step: int) -> None:
        self._begin(self._scheduler.start())
        while step not in self._commits:
            assert self._coming, "nothing is under way and nothing may start"
            self._now, _, since, command, event = heappop(self._coming)
            if isinstance(command, Commit):
                self._commits[command.step] = self._now
            self._activities += self._activity(since, self._now, command, event)
            self._begin(self._scheduler.handle(event))

    def seen(self) -> Simulated:
        ends = sorted(self._commits.items(), key=lambda commit: commit[1])
        begins = [0.0, *(end for _, end in ends)]
        step_seconds = {step: end - begin for (step, end), begin in zip(ends, begins, strict=False)}
        under_way: list[Activity] = []
        for end, _, since, command, event in sorted(self._coming, key=lambda coming: coming[:2]):
            if since < self._now:
                under_way += self._activity(since, end, command, event)
        return Simulated(tuple(self._activities), tuple(under_way), step_seconds, self._now)

    def _begin(self, commands: Iterable[Command]) -> None:
        for command in commands:
            seconds = self._costs.seconds(command)
            assert seconds >= 0, f"{command} takes {seconds} s"
            since = now = self._beginning(command, seconds)
            if isinstance(command, Run) and self._task_of[command.task].streams:
                offsets = list(self._costs.shard_offsets(command))
                # The last shard is the end of the run.
                for shard, offset in zip(command.shards[:-1], offsets[:-1], strict=True):
                    self._expect(
                        since, now + offset, command, ShardDone(command.step, command.task, shard, command.round)
                    )
                    since = now + offset
            self._expect(since, now + seconds, command, self._outcome(command))

    def _beginning(self, command: Command, seconds: float) -> float:
        """Return now, or the end of the run or sync before it."""
        match command:
            case Run(_, task):
                waits_for, busy = self._task_of[task].executor, {self._task_of[task].executor}
            case Sync(_, follower, source, _):
                waits_for, busy = source, {follower, source}
            case _:
                return self._now
        begins = max(self._now, self._through[waits_for])
        for name in busy - {HOST}:
            # Weights in flight arrive during a run.
            self._through[name] = max(self._through[name], begins + seconds)
        return begins

    def _outcome(self, command: Command) -> Event:
        """Return the expected event: the batch of a filter is full in the expected round of the plan."""
        selects = isinstance(command, Run) and self._task_of[command.task].selects
        if isinstance(command, Run) and selects and command.round + 1 < self._plan.expected_rounds:
            return BatchShort(command)
        return CommandDone(command)

    def _expect(self, since: float, when: float, command: Command, event: Event) -> None:
        heappush(self._coming, (when, next(self._order), since, command, event))

    def _activity(self, start: float, end: float, command: Command, event: Event) -> Iterator[Activity]:
        """Yield the activities that end with `event`; none for a commit."""
        match command:
            case Run(step, name, shards, _):
                task = self._task_of[name]
                last = shards[-1] if shards and (task.streams or len(shards) == 1) else None
                shard = event.shard if isinstance(event, ShardDone) else last
                yield Activity(name, task.op, start, end, step, shard, *self._places[task.executor])
            case Sync() | Sleep() | Wake() | Restart() | Save():
                move = move_of(command)
                yield Activity(move.name, move.name, start, end, command.step, None, *self._places[move.executor])
