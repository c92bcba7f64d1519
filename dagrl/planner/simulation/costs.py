"""How long commands take: what `dagrl.planner.simulation.simulate` asks, and a table that answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dagrl.scheduler.commands import Command, Commit, Restart, Run, Save, Sleep, Sync, Wake


class Costs(Protocol):
    """Seconds of whatever the scheduler may tell the driver to do."""

    def seconds(self, command: Command) -> float:
        """How long `command` takes; never negative."""
        ...

    def shard_offsets(self, run: Run) -> Sequence[float]:
        """When each of `run.shards` is done, in seconds after the run's begin, of a task that streams.

        In the order of `run.shards`, ascending; the last is ``seconds(run)``.
        """
        ...


@dataclass(frozen=True, slots=True)
class CostTable:
    """Fixed seconds: the same in every step, and for every executor."""

    shard: Mapping[str, float] = field(default_factory=dict)
    """Task -> seconds that each shard of a run takes; tasks that are not named take none."""
    sync: float = 0.0
    sleep: float = 0.0
    wake: float = 0.0
    restart: float = 0.0
    save: float = 0.0
    commit: float = 0.0

    def seconds(self, command: Command) -> float:
        """How long `command` takes."""
        match command:
            case Run(_, task, shards):
                return self.shard.get(task, 0.0) * len(shards)
            case Sync():
                return self.sync
            case Sleep():
                return self.sleep
            case Wake():
                return self.wake
            case Restart():
                return self.restart
            case Save():
                return self.save
            case Commit():
                return self.commit

    def shard_offsets(self, run: Run) -> Sequence[float]:
        """One shard after the other."""
        return [self.shard.get(run.task, 0.0) * count for count in range(1, len(run.shards) + 1)]
