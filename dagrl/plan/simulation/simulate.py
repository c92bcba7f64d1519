"""What a run will be like: the scheduler of a run, driven by what its commands cost instead of by workers.

Without chance: the same plan and costs give the same simulation. Of what happens at the same time, what was begun first
is told first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from dagrl.plan.plan import HOST, Plan
from dagrl.plan.schedule.commands import (
    BatchShort,
    Command,
    Commit,
    Event,
    Restart,
    Run,
    RunDone,
    Save,
    ShardDone,
    Sleep,
    Sync,
    Wake,
    outcome_of,
)
from dagrl.plan.schedule.scheduler import Scheduler
from dagrl.plan.simulation.costs import Costs


class Activity(NamedTuple):
    """That something runs, from `start` to `end` in seconds since the first step began."""

    name: str
    """The task, or ``sync``, ``sleep``, ``wake``, ``restart``, ``save``."""
    category: str
    """The op, or the name."""
    start: float
    end: float
    """Of a run that streams, each shard has the time from the one before it to its own end."""
    step: int
    shard: int | None
    """None: all of the step's batch, or no rows at all."""
    executor: str
    """Of a sync, the one that follows."""
    group: str
    """The host's is ``host``."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a simulation has seen."""

    activities: tuple[Activity, ...]
    """All that had ended when the last step was committed, in the order of their ends."""
    step_seconds: dict[int, float]
    """Step -> what it adds to the run: from the commit of the step before it to its own."""
    idle: dict[str, float]
    """Group -> share of the time in which none of its executors was at work, 0 to 1; of the host, of its workers."""
    seconds: float
    """From the beginning of the first step to the commit of the last."""


def simulate(plan: Plan, costs: Costs, steps: int) -> Simulated:
    """The first `steps` of the run that `plan` is for. Later steps are begun as they would be, and cut off."""
    assert 1 <= steps <= plan.steps, f"{steps} steps of a plan for {plan.steps}"
    simulation = _Simulation(plan, costs)
    simulation.go_on_until(steps)
    return simulation.seen()


class _Busy:
    """For how long a group is at work. Its commands are told in the order in which they begin."""

    def __init__(self) -> None:
        self._seconds = self._until = 0.0

    def add(self, start: float, end: float) -> None:
        self._seconds += max(0.0, end - max(start, self._until))
        self._until = max(self._until, end)

    def before(self, now: float) -> float:
        """Seconds before `now`, by which all have begun."""
        return self._seconds - max(0.0, self._until - now)


class _Simulation:
    def __init__(self, plan: Plan, costs: Costs) -> None:
        self._plan, self._costs = plan, costs
        self._scheduler = Scheduler(plan)
        self._now = 0.0
        self._task_of = {task.name: task for task in plan.tasks}
        self._group_of = {name: executor.group or HOST for name, executor in plan.executors.items()}
        self._coming: list[tuple[float, int, float, Command, Event]] = []
        """Heap of what will have happened: when, in which order, since when, the command, its event."""
        self._order = count()
        self._busy = {group: _Busy() for group in self._group_of.values() if group != HOST}
        self._host_seconds = 0.0
        self._activities: list[Activity] = []
        self._commits: dict[int, float] = {}

    def go_on_until(self, step: int) -> None:
        """Carry out commands until `step` is committed."""
        self._begin(self._scheduler.start())
        while step not in self._commits:
            assert self._coming, "nothing is under way and nothing may start"
            self._now, _, since, command, event = heappop(self._coming)
            self._note(since, command, event)
            self._begin(self._scheduler.handle(event))

    def seen(self) -> Simulated:
        """What there was, up to now."""
        ends = sorted(self._commits.items(), key=lambda commit: commit[1])
        begins = [0.0, *(end for _, end in ends)]
        idle = {group: self._idle_share(busy.before(self._now), 1) for group, busy in self._busy.items()}
        too_much = sum(
            end - self._now for end, _, _, command, event in self._coming if self._is_on_host(command, event)
        )
        idle[HOST] = self._idle_share(self._host_seconds - too_much, self._plan.executors[HOST].ranks)
        step_seconds = {step: end - begin for (step, end), begin in zip(ends, begins, strict=False)}
        return Simulated(tuple(self._activities), step_seconds, idle, self._now)

    def _idle_share(self, busy_seconds: float, hands: int) -> float:
        return 1 - busy_seconds / (self._now * hands) if self._now else 0.0

    def _begin(self, commands: Iterable[Command]) -> None:
        now = self._now
        for command in commands:
            seconds = self._costs.seconds(command)
            assert seconds >= 0, f"{command} takes {seconds} s"
            since = now
            if isinstance(command, Run) and self._task_of[command.task].streams:
                offsets = list(self._costs.shard_offsets(command))
                # The last shard is the end of the run.
                for shard, offset in zip(command.shards[:-1], offsets[:-1], strict=True):
                    self._expect(
                        since, now + offset, command, ShardDone(command.step, command.task, shard, command.round)
                    )
                    since = now + offset
            self._expect(since, now + seconds, command, self._outcome(command))
            for name in self._scheduler.workers_of(command):
                if name == HOST:
                    self._host_seconds += seconds
                else:
                    self._busy[self._group_of[name]].add(now, now + seconds)

    def _outcome(self, command: Command) -> Event:
        """As it is likely to be: a filter's batch is full in the round that the plan counts with."""
        selects = isinstance(command, Run) and self._task_of[command.task].selects
        if isinstance(command, Run) and selects and command.round + 1 < self._plan.expected_rounds:
            return BatchShort(command)
        return outcome_of(command)

    def _expect(self, since: float, when: float, command: Command, event: Event) -> None:
        heappush(self._coming, (when, next(self._order), since, command, event))

    def _note(self, since: float, command: Command, event: Event) -> None:
        match command, event:
            case Run(step, name, shards, _), _:
                task = self._task_of[name]
                last = shards[-1] if shards and (task.streams or len(shards) == 1) else None
                shard = event.shard if isinstance(event, ShardDone) else last
                self._add(name, task.op, since, step, shard, task.executor)
            case Commit(step, _), _:
                self._commits[step] = self._now
            case Sync(step, executor, _, _) | Sleep(step, executor, _) | Wake(step, executor, _), _:
                self._add_other(command, since, step, executor)
            case Restart(step, executor) | Save(step, executor), _:
                self._add_other(command, since, step, executor)

    def _add_other(self, command: Command, since: float, step: int, executor: str) -> None:
        name = type(command).__name__.lower()
        self._add(name, name, since, step, None, executor)

    def _add(self, name: str, category: str, since: float, step: int, shard: int | None, executor: str) -> None:
        group = self._group_of[executor]
        self._activities.append(Activity(name, category, since, self._now, step, shard, executor, group))

    def _is_on_host(self, command: Command, event: Event) -> bool:
        return isinstance(event, RunDone | BatchShort) and HOST in self._scheduler.workers_of(command)
