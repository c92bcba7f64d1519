"""The last commands and events of a scheduler, for the message of an error, and the commands that are under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from dagrl.scheduler.commands import (
    BatchShort,
    Command,
    CommandDone,
    Commit,
    Event,
    LastStep,
    Restart,
    Run,
    Save,
    ShardDone,
    Sleep,
    StopRequested,
    Sync,
    Wake,
    WorkerLost,
)
from dagrl.scheduler.plan import Plan

_KEPT = 4096
"""Commands and events that are kept."""


class SchedulerError(Exception):
    """An invariant of the scheduler does not hold, or an event belongs to no command: a bug.

    `story`: the commands and events that led to it, one per line.
    """

    def __init__(self, cause: str, story: str) -> None:
        super().__init__(cause)
        self.story = story

    def __str__(self) -> str:
        return f"the scheduler's state is wrong: {self.args[0]}"


class History:
    """Derives the commands under way from commands and events alone, independently of the scheduler's other state."""

    def __init__(self, plan: Plan) -> None:
        self.under_way: dict[Command, None] = {}
        """In the order in which they began."""
        self._executor_of = {task.name: task.executor for task in plan.tasks}
        self._entries: deque[Command | Event] = deque(maxlen=_KEPT)
        self._count = 0

    def begin(self, commands: Iterable[Command]) -> None:
        """Raises SchedulerError if a command is under way already."""
        for command in commands:
            self._add(command)
            if command in self.under_way:
                self.fail(f"`{describe(command)}` begins twice", command)
            self.under_way[command] = None

    def note(self, event: Event) -> None:
        """Raises SchedulerError if no command under way can have ended with `event`."""
        self._add(event)
        match event:
            case CommandDone(command) | BatchShort(command):
                if command not in self.under_way:
                    self.fail(f"`{describe(command)}` has ended, but is not under way", command)
                del self.under_way[command]
            case ShardDone():
                if not any(isinstance(run, Run) and _yields(run, event) for run in self.under_way):
                    self.fail(f"`{describe(event)}`, but no run of it is under way", event)
            case WorkerLost(executor):
                for command in [each for each in self.under_way if executor in self.executors(each)]:
                    del self.under_way[command]

    def executors(self, item: Command | Event) -> tuple[str, ...]:
        """The executors that a command occupies, or that an event is about."""
        match item:
            case Run(_, task) | ShardDone(_, task):
                return (self._executor_of[task],)
            case Sync(_, follower, source):
                return follower, source
            case Sleep() | Wake() | Restart() | Save() | WorkerLost():
                return (item.executor,)
            case CommandDone(command) | BatchShort(command):
                return self.executors(command)
            case Commit() | LastStep() | StopRequested():
                return ()

    def fail(self, cause: str, about: Command | Event) -> None:
        """Raises SchedulerError with the story of the executors of `about`."""
        raise SchedulerError(cause, self.story(self.executors(about)))

    def story(self, about: Collection[str] = (), step: int | None = None) -> str:
        """The kept commands and events that are about these tasks or executors, of `step`, oldest first; then the
        commands under way. Empty `about`: all; None: of all steps. Events about the whole run belong to each story.
        """
        first = self._count - len(self._entries) + 1
        lines = [
            f"#{number} {'event' if isinstance(entry, Event) else 'begin'}: {describe(entry)}"
            for number, entry in enumerate(self._entries, first)
            if self._is_about(entry, about, step)
        ]
        under_way = [f"  {describe(command)}" for command in self.under_way] or ["  nothing"]
        return "\n".join([*lines, "under way:", *under_way])

    def _add(self, entry: Command | Event) -> None:
        self._entries.append(entry)
        self._count += 1

    def _is_about(self, entry: Command | Event, about: Collection[str], step: int | None) -> bool:
        executors, command = self.executors(entry), entry.command if isinstance(entry, CommandDone) else entry
        command = command.run if isinstance(command, BatchShort) else command
        names = {*executors, command.task} if isinstance(command, Run | ShardDone) else {*executors}
        of_step = step is None or getattr(command, "step", step) == step
        return of_step and (not about or not names or not names.isdisjoint(about))


def _yields(run: Run, event: ShardDone) -> bool:
    return (run.step, run.task, run.round) == (event.step, event.task, event.round) and event.shard in run.shards


def describe(item: Command | Event) -> str:
    """One line for a person."""
    match item:
        case Run(step, task, shards, round_):
            some = ", ".join(map(str, shards)) if len(shards) <= 8 else f"{shards[0]}, ..., {shards[-1]}"
            return f"run {task} of step {step}, shards {some}" + f", round {round_}" * (round_ > 0)
        case Sync(step, follower, source, version):
            return f"sync {follower} with version {version} of {source}, for step {step}"
        case Sleep(step, executor, residency) | Wake(step, executor, residency):
            return f"{type(item).__name__.lower()} {executor} to {residency.name}, for step {step}"
        case Restart(step, executor) | Save(step, executor):
            return f"{type(item).__name__.lower()} {executor}, for step {step}"
        case Commit(step):
            return f"commit step {step}"
        case ShardDone(step, task, shard, round_):
            return f"shard {shard} of {task} of step {step} is done" + f", round {round_}" * (round_ > 0)
        case CommandDone(command):
            return f"done: {describe(command)}"
        case BatchShort(run):
            return f"too few groups: {describe(run)}"
        case WorkerLost(executor):
            return f"{executor} has lost workers"
        case LastStep(step):
            return f"step {step} is the last one"
        case StopRequested():
            return "a stop is requested"
