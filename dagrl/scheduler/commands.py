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
    """A rollout finished one shard and continues with the others."""

    step: int
    task: str
    shard: int
    round: int = 0


@dataclass(frozen=True, slots=True)
class CommandDone:
    """A command ended without a failure.

    After a `Save` the state may not yet be on the disk. After a `Restart` the executor is awake and may lack weights.
    """

    command: Command


@dataclass(frozen=True, slots=True)
class BatchShort:
    """A filter's run ended, and too few groups passed: its step needs another round."""

    run: Run


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """`executor`, which is not trained, lost workers, and with them its weights.

    All commands on it have ended and report nothing else. Finished shards of its runs stay done; the others run again.
    """

    executor: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user requested a stop at the next step boundary."""


@dataclass(frozen=True, slots=True)
class LastStep:
    """The source read the last prompts in `step`, which is the run's last step."""

    step: int


Event = ShardDone | CommandDone | BatchShort | WorkerLost | LastStep | StopRequested
