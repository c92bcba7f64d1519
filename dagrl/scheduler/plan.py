"""The plan of a run: which executor does which task, on which ranks. `placement.py` makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from dagrl.config.coordinates import Coordinates
from dagrl.graph.op_contracts import Scope

HOST = "host"
"""The executor of nodes without an engine."""


class Rows(Enum):
    """Which batch of a step a task works on."""

    TRAIN = "train"
    VALIDATION = "val"


@dataclass(frozen=True, slots=True)
class Executor:
    """Workers that run tasks together: the ranks of an engine, or the host."""

    name: str
    group: str | None
    places: tuple[Coordinates, ...]
    """Where each rank sits in the layout; ranks with the same dp get the same rows."""
    engines: tuple[str, ...] = ()
    """Engines on these ranks; the first is the one whose weights move, the others are frozen copies of its start."""
    weights_from: str | None = None
    """Executor whose weights it takes."""
    trained: bool = False
    """Whether some task trains it."""
    on_gpus: bool = False
    """Whether its ranks have GPUs; else they have CPU slots."""
    sleeps: bool = False
    """Whether it leaves its devices' memory while another executor of its group works."""
    measures_memory: bool = False
    """Whether how much it takes depends on how much is free when it starts."""
    leaders_speak: bool = False
    """Whether only primary ranks are given rows: the further slots of a server do their part unasked."""

    @property
    def ranks(self) -> int:
        """Workers that it has."""
        return len(self.places)

    @property
    def replicas(self) -> int:
        """Data-parallel ranks: how many ways rows are split."""
        return 1 + max(place.dp for place in self.places)


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """A node as it runs in one step, on the training or the validation batch."""

    name: str
    """The node's name; ``val/`` before it on the validation batch."""
    node: str
    op: str
    executor: str
    scope: Scope
    rows: Rows
    engine: str | None = None
    inputs: dict[str, tuple[str, str]] = field(default_factory=dict, hash=False)
    """Column as the op calls it -> (task that wrote it, column as the pipeline calls it)."""
    outputs: dict[str, str] = field(default_factory=dict, hash=False)
    """Column as the op calls it -> column as the pipeline calls it."""
    streams: bool = False
    """One run takes all shards and finishes them one by one."""
    trains: bool = False
    generates: bool = False
    frozen: bool = False
    """Uses start weights that no update moves."""
    pieces: tuple[tuple[int, ...], ...] = ()
    """Of a batch task that can be run piece by piece: the shards of each piece, in the order in which they are run;
    each shard once. Empty: all shards are one piece. Where a task trains, the pieces after its first may wait for
    nothing that needs the weights from before."""
    in_rounds: bool = False
    """Whether it is a filter's, or before one: it runs once a round, until the batch is full."""
    selects: bool = False
    """Whether it is a filter: says which groups the batch consists of. All tasks that are not in rounds, of those that
    read from such, wait for it; their batch is what it lets pass."""
    sampled_by: str | None = None
    """The rollout node whose responses it works on; None before any."""
    whole_groups: bool = False
    """Whether the rank of an engine that gets a row gets all of its group."""
    told_as: str = ""
    """What comes before the names of its metrics: of several updates, all but the first say which they are."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Tasks whose results it takes, each once, in a fixed order."""
        return tuple(dict.fromkeys(task for task, _ in self.inputs.values()))


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the scheduler has to know."""

    executors: dict[str, Executor]
    tasks: tuple[PlannedTask, ...]
    """In topological order, validation's included."""
    shards: int
    steps: int
    samples_per_prompt: int = 1
    """Rows of a group on the training batch."""
    val_samples_per_prompt: int = 1
    """Rows of a group on the validation batch."""
    max_staleness: int = 0
    in_flight: bool = False
    """Whether new weights may come to a generator in the midst of a run."""
    save_every: int | None = None
    validate_every: int | None = None
    validate_first: bool = False
    expected_rounds: int = 1
    """Rounds that a step's batch is likely to take; for estimates alone."""

    def task(self, name: str) -> PlannedTask:
        """The task of that name."""
        return next(task for task in self.tasks if task.name == name)

    def group_size(self, rows: Rows) -> int:
        """Rows of a group of that batch."""
        return self.samples_per_prompt if rows is Rows.TRAIN else self.val_samples_per_prompt

    def waits_for(self, task: PlannedTask) -> tuple[str, ...]:
        """Tasks after which `task` may run, each once: behind a filter, that one in place of all that is in rounds."""
        in_rounds = {each.name for each in self.tasks if each.in_rounds}
        if task.in_rounds or in_rounds.isdisjoint(task.needs):
            return task.needs
        (chooser,) = (each.name for each in self.tasks if each.selects)
        return (chooser, *(need for need in task.needs if need not in in_rounds))

    def rounds_of(self, task: PlannedTask) -> int:
        """How often `task` is likely to run in a step; for estimates alone."""
        return self.expected_rounds if task.in_rounds else 1

    def generates(self, executor: str) -> bool:
        """Whether some task has an executor sample responses."""
        return any(task.generates for task in self.tasks if task.executor == executor)

    def queues(self, executor: str) -> bool:
        """Whether a run may be sent to an executor's workers while they are at another, to be taken up behind it.

        Not on the host, whose workers are taken singly; nor where prompts are dealt out, or weights come, meanwhile;
        nor where others of the group could have their turn between the two.
        """
        mine = self.executors[executor]
        if executor == HOST or mine.weights_from or self.generates(executor):
            return False
        others = (other for other in self.executors.values() if other.group == mine.group and other is not mine)
        return all(other.sleeps for other in others)

    def promises(self, task: PlannedTask) -> bool:
        """Whether what `task` will have written is as good as there for runs behind it on the same workers.

        It is known which rank will have which rows, and those workers cannot be lost without the whole run.
        """
        own = self.executors[task.executor].trained and self.queues(task.executor)
        return own and task.scope is Scope.ROW and not task.in_rounds

    def validates(self, step: int) -> bool:
        """Whether `step` ends with a validation; step 0 is the one before training."""
        if step == 0:
            return self.validate_first
        return self.validate_every is not None and step % self.validate_every == 0

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`."""
        return step == self.steps or (self.save_every is not None and step % self.save_every == 0)

    def tasks_of(self, step: int) -> tuple[PlannedTask, ...]:
        """What has to be done in `step`, in topological order."""
        return tuple(task for task in self.tasks if (step > 0 if task.rows is Rows.TRAIN else self.validates(step)))
