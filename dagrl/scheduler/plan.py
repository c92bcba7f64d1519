"""The plan of a run: tasks, their executors and ranks. `placement.py` makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from dagrl.config.coordinates import Coordinates
from dagrl.config.schema import Scope

HOST = "host"
"""The executor of nodes without an engine: the CPU workers."""


class WorkerId(NamedTuple):
    """A worker: its executor and its rank there. Files and messages write it as ``executor/rank``."""

    executor: str
    rank: int

    def __str__(self) -> str:
        return f"{self.executor}/{self.rank}"

    @staticmethod
    def parse(text: str) -> WorkerId:
        """Parse a worker's id. Raises ValueError for another form."""
        executor, _, rank = text.rpartition("/")
        return WorkerId(executor, int(rank))


class Rows(Enum):
    """The batch of a step that a task processes."""

    TRAIN = "train"
    VALIDATION = "val"


@dataclass(frozen=True, slots=True)
class Executor:
    """Workers that run tasks together: the ranks of an engine, or the CPU workers."""

    name: str
    group: str | None
    places: tuple[Coordinates, ...]
    """The coordinates of each rank. Ranks with the same dp get the same rows."""
    engines: tuple[str, ...] = ()
    """Engines on these ranks. The others are copies of the first one's start weights, or their moving average."""
    weights_from: str | None = None
    """The executor whose weights it receives."""
    trained: bool = False
    restored: bool = False
    """Whether it loads its weights from a checkpoint: it is trained, or was."""
    on_gpus: bool = False
    sleeps: bool = False
    """Whether it is offloaded while another executor of its group works."""
    are_servers: bool = False
    """Whether its replicas are servers: they size their caches by the free memory at their start, and only primary
    ranks get rows.
    """

    @property
    def ranks(self) -> int:
        return len(self.places)

    @property
    def replicas(self) -> int:
        """Number of data-parallel ranks."""
        return 1 + max(place.dp for place in self.places)

    def ranks_lost_with(self, rank: int) -> list[int]:
        """The ranks that cannot work without `rank`, including it: the ranks of its server."""
        lost = self.places[rank]
        return [other for other, place in enumerate(self.places) if place.dp == lost.dp] if self.are_servers else [rank]


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """A node in one step, on the training or the validation batch."""

    name: str
    """The node's name; ``val/`` before it on the validation batch."""
    node: str
    op: str
    executor: str
    scope: Scope
    rows: Rows
    engine: str | None = None
    inputs: dict[str, tuple[str, str]] = field(default_factory=dict, hash=False)
    """The op's name of a column -> (task that wrote it, the pipeline's name of the column)."""
    outputs: dict[str, str] = field(default_factory=dict, hash=False)
    """The op's name of a column -> the pipeline's name of the column."""
    streams: bool = False
    """Whether one run takes all shards and finishes them one by one."""
    trains: bool = False
    generates: bool = False
    frozen: bool = False
    """Whether it uses frozen start weights."""
    averaged: bool = False
    """Whether it uses the moving average of the weights."""
    pieces: tuple[tuple[int, ...], ...] = ()
    """For a batch task that runs in pieces: the shards of each piece, in order. Empty: one piece with all shards. No
    other task may need the old weights after the first piece of an update."""
    in_rounds: bool = False
    """Whether it is the filter, or before it, and runs once per round, until the batch is full."""
    selects: bool = False
    """Whether it is the filter, which selects the groups of the batch. Readers outside the rounds wait for it."""
    replays: bool = False
    """Whether it is the buffer, which adds groups of earlier steps to the batch. Its runs are in the order of steps."""
    in_order: bool = False
    """Whether its state is passed from step to step, so that its runs are in the order of steps."""
    sampled_by: str | None = None
    """The rollout node whose responses it processes; None before the first rollout."""
    whole_groups: bool = False
    """Whether all rows of a group go to the same rank."""
    metric_prefix: str = ""
    """Prefix of its metrics. With several updates, all but the first have their name in it."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The distinct tasks whose outputs it reads, in a fixed order."""
        return tuple(dict.fromkeys(task for task, _ in self.inputs.values()))


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the scheduler needs to know."""

    executors: dict[str, Executor]
    tasks: tuple[PlannedTask, ...]
    """Tasks in topological order, including validation."""
    shards: int
    steps: int
    samples_per_prompt: int = 1
    """Rows per group in the training batch."""
    val_samples_per_prompt: int = 1
    """Rows per group in the validation batch."""
    max_staleness: int = 0
    in_flight: bool = False
    """Whether a generator may receive new weights while it samples."""
    save_every: int | None = None
    validate_every: int | None = None
    validate_first: bool = False
    only_validates: bool = False
    """Whether it only validates the weights of its single, last step."""
    expected_rounds: int = 1
    """Expected rounds per step, for estimates."""

    def task(self, name: str) -> PlannedTask:
        return next(task for task in self.tasks if task.name == name)

    @property
    def groups(self) -> set[str]:
        return {executor.group for executor in self.executors.values() if executor.group is not None}

    def group_size(self, rows: Rows) -> int:
        """Rows per group in this batch."""
        return self.samples_per_prompt if rows is Rows.TRAIN else self.val_samples_per_prompt

    def waits_for(self, task: PlannedTask) -> tuple[str, ...]:
        """Tasks that must be done before `task`. After the filter, all tasks in rounds are represented by it.

        An update waits for users of the moving average, which it changes.
        """
        needs = task.needs
        if task.trains:
            averaged = (other.name for other in self.tasks if other.averaged and other.executor == task.executor)
            needs = tuple(dict.fromkeys((*needs, *averaged)))
        in_rounds = {other.name for other in self.tasks if other.in_rounds}
        if task.in_rounds or in_rounds.isdisjoint(needs):
            return needs
        (chooser,) = (other.name for other in self.tasks if other.selects)
        return (chooser, *(need for need in needs if need not in in_rounds))

    def rounds_of(self, task: PlannedTask) -> int:
        """Expected runs of `task` in a step, for estimates."""
        return self.expected_rounds if task.in_rounds else 1

    def generates(self, executor: str) -> bool:
        return any(task.generates for task in self.tasks if task.executor == executor)

    def restarts(self, executor: str) -> bool:
        """Whether lost workers of an executor can be restarted while the others live on: they are not trained, and
        independent of each other.
        """
        mine = self.executors[executor]
        return not mine.trained and (mine.are_servers or self.generates(executor))

    def queues(self, executor: str) -> bool:
        """Whether a run may be queued behind another one on the same workers.

        This excludes CPU workers, which take single tasks; nor where lost workers restart, because the two runs would
        wait for each other; nor if another executor of the group could run between the two.
        """
        mine = self.executors[executor]
        if executor == HOST or mine.weights_from or self.generates(executor) or self.restarts(executor):
            return False
        others = (other for other in self.executors.values() if other.group == mine.group and other is not mine)
        return all(other.sleeps for other in others)

    def outputs_are_predictable(self, task: PlannedTask) -> bool:
        """Whether runs queued behind `task` may read its outputs: the ranks of its rows are known in advance, and the
        whole run restarts if these workers are lost.
        """
        own = self.executors[task.executor].trained and self.queues(task.executor)
        return own and not task.trains and not task.in_rounds

    def validates(self, step: int) -> bool:
        """Whether `step` ends with a validation. Step 0 is before training."""
        if self.only_validates:
            return step == self.steps
        if step == 0:
            return self.validate_first
        return self.validate_every is not None and step % self.validate_every == 0

    def saves(self, step: int) -> bool:
        if self.only_validates:
            return False
        return step == self.steps or (self.save_every is not None and step % self.save_every == 0)

    def tasks_of(self, step: int) -> tuple[PlannedTask, ...]:
        """The tasks of `step`, in topological order."""
        return tuple(task for task in self.tasks if (step > 0 if task.rows is Rows.TRAIN else self.validates(step)))
