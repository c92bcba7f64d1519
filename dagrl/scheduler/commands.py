"""What the scheduler tells the driver to do, and what the driver tells the scheduler has happened."""

from __future__ import annotations

from dataclasses import dataclass

from dagrl.config.residency import Residency


@dataclass(frozen=True, slots=True)
class Run:
    """Run `task` of `step` on these shards."""

    step: int
    task: str
    shards: tuple[int, ...]
    round: int = 0
    """Of a task that runs in rounds: which one, counted from 0."""


@dataclass(frozen=True, slots=True)
class Sync:
    """Bring the weights of `source`, at `version`, to `follower`, for which `step` waits."""

    step: int
    follower: str
    source: str
    version: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """Have `executor` give its devices' memory back, down to `residency`: `step` waits for the room."""

    step: int
    executor: str
    residency: Residency


@dataclass(frozen=True, slots=True)
class Wake:
    """Bring `executor` back up to `residency`, for which `step` waits."""

    step: int
    executor: str
    residency: Residency


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the lost workers of `executor` again, for which `step` waits. The others of its group have made room."""

    step: int
    executor: str


@dataclass(frozen=True, slots=True)
class Save:
    """Write the state of `executor` into the checkpoint of `step`."""

    step: int
    executor: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the step's metrics; with `save`, all trained executors are in its checkpoint, and it counts from now on."""

    step: int
    save: bool


Command = Run | Sync | Sleep | Wake | Restart | Save | Commit
OnEngine = Run | Sync | Restart | Save
"""What needs room in the memory of a group's devices."""


@dataclass(frozen=True, slots=True)
class ShardDone:
    """A streaming run has finished one shard and goes on with the others."""

    step: int
    task: str
    shard: int
    round: int = 0


@dataclass(frozen=True, slots=True)
class RunDone:
    """A run is over: all its shards are done and its workers are free."""

    run: Run


@dataclass(frozen=True, slots=True)
class BatchShort:
    """A filter's run is over, and too few groups have passed so far: its step needs another round."""

    run: Run


@dataclass(frozen=True, slots=True)
class WeightsSynced:
    """A sync is over."""

    sync: Sync


@dataclass(frozen=True, slots=True)
class EngineReady:
    """A `Sleep`, `Wake` or `Restart` is over: `executor` has just `residency` in its devices' memory.

    After a restart that is all: awake, though the weights of one that follows are still to come.
    """

    executor: str
    residency: Residency


@dataclass(frozen=True, slots=True)
class StateSaved:
    """A save is over: the executor may go on, whether or not its state is on the disk yet."""

    save: Save


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """A commit is over."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Workers of `executor`, which is not trained, are gone: its weights with them, and all that it held in memory.

    All that was under way on it is over and reports no more, a sync or a move included. Of its runs the shards that
    were done stay done; the others are to be run again.
    """

    executor: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user wants the run to end at the next step boundary."""


Event = (
    ShardDone
    | RunDone
    | BatchShort
    | WeightsSynced
    | EngineReady
    | StateSaved
    | StepCommitted
    | WorkerLost
    | StopRequested
)


def outcome_of(command: Command) -> Event:
    """What is reported when `command` is over and nothing went wrong; a filter's batch is not short."""
    match command:
        case Run():
            return RunDone(command)
        case Sync():
            return WeightsSynced(command)
        case Sleep(_, executor, residency) | Wake(_, executor, residency):
            return EngineReady(executor, residency)
        case Restart(_, executor):
            return EngineReady(executor, Residency.AWAKE)
        case Save():
            return StateSaved(command)
        case Commit():
            return StepCommitted(command)
