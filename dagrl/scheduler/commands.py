"""Commands of the scheduler to the driver, and events of the driver to the scheduler."""

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
    """Dynamic-sampling round, from 0."""


@dataclass(frozen=True, slots=True)
class Sync:
    """Send the weights of `source`, at `version`, to `follower`, for `step`."""

    step: int
    follower: str
    source: str
    version: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """Offload `executor` down to `residency`: `step` needs the memory."""

    step: int
    executor: str
    residency: Residency


@dataclass(frozen=True, slots=True)
class Wake:
    """Onload `executor` up to `residency`, for `step`."""

    step: int
    executor: str
    residency: Residency


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart the lost workers of `executor`, for `step`. The other executors of its group are offloaded."""

    step: int
    executor: str


@dataclass(frozen=True, slots=True)
class Save:
    """Write the state of `executor` into the checkpoint of `step`."""

    step: int
    executor: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the step's metrics and, with `save`, finish its checkpoint: all trained executors have saved."""

    step: int
    save: bool


Command = Run | Sync | Sleep | Wake | Restart | Save | Commit
OnEngine = Run | Sync | Restart | Save
"""Commands that need device memory."""


@dataclass(frozen=True, slots=True)
class ShardDone:
    """A rollout has finished one shard and continues with the others."""

    step: int
    task: str
    shard: int
    round: int = 0


@dataclass(frozen=True, slots=True)
class RunDone:
    """A run has ended: all its shards are done and its workers are free."""

    run: Run


@dataclass(frozen=True, slots=True)
class BatchShort:
    """A filter's run has ended, and too few groups have passed: its step needs another round."""

    run: Run


@dataclass(frozen=True, slots=True)
class WeightsSynced:
    """A sync has ended."""

    sync: Sync


@dataclass(frozen=True, slots=True)
class EngineReady:
    """A `Sleep`, `Wake` or `Restart` has ended: `executor` holds `residency`. After a restart it may lack weights."""

    executor: str
    residency: Residency


@dataclass(frozen=True, slots=True)
class StateSaved:
    """A save has ended: the executor may continue. Its state may still be on its way to the disk."""

    save: Save


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """A commit has ended."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """`executor`, which is not trained, has lost workers, and with them its weights.

    All commands on it have ended and report nothing else. Finished shards of its runs stay done; the others run again.
    """

    executor: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user has requested a stop at the next step boundary."""


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
    """The event of a successful `command`; a filter's batch is not short."""
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
