"""Seconds of commands: the interface that a simulation needs, and a table that implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dagrl.scheduler.commands import Command, Run


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
    """Task -> seconds of each shard of a run; other tasks take none."""
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
