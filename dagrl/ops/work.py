"""The work of an op, as the driver sends it to a worker: row ids and object refs, never the columns themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dagrl.scheduler.plan import WorkerId

if TYPE_CHECKING:
    import ray

type CacheKey = bytes
"""Names an object in a worker's cache: see `dagrl.workers.object_cache`."""


@dataclass(frozen=True, slots=True)
class ColumnSource:
    """The objects that hold the output of one task, and the columns to read from them."""

    refs: tuple[ray.ObjectRef | CacheKey, ...]
    """The blocks that hold any of the rows. If several hold a row, the first one is read."""
    columns: dict[str, str]
    """The op's name of a column -> the column's name in the blocks."""


@dataclass(frozen=True, slots=True)
class PartWork:
    """Rows that a rank processes together, and where to read their columns."""

    index: int
    rows: np.ndarray
    """Row ids in the order in which the op gets them, int64."""
    sources: tuple[ColumnSource, ...]


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """Tokens that an earlier step sampled for a group."""

    ref: ray.ObjectRef
    rows: np.ndarray
    """Ids of the group's rows in the object, int64, in order."""


@dataclass(frozen=True, slots=True)
class PausedGroup:
    """Agents or responses of several turns that an earlier step started for a group.

    A worker holds them in memory; after its end, they start again.
    """

    worker: WorkerId
    step: int
    group: int
    """The group in that step."""


type Begun = PartialRollout | PausedGroup
"""Responses of a group that an earlier step started."""


class Carried(NamedTuple):
    """A prompt that an earlier step did not finish."""

    prompt: int
    begun: Begun | None = None
    """Its partial responses."""
    sampled: tuple[int, ...] = ()
    """Tokens of each of its samples; -1: not started."""


@dataclass(frozen=True, slots=True)
class PendingWeights:
    """Weights on their way to a generator."""

    sync: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWork:
    """One rank's share of a run. Ops without an engine need only these fields."""

    step: int
    task: str
    op: str
    node: str | None
    """The declared node. None for implicit ones."""
    validation: bool
    committed: int
    """Newest committed step. Objects of this step and earlier ones are no longer needed."""
    shards: int
    parts: tuple[PartWork, ...] = ()
    outputs: dict[str, str]
    """The op's name of a column -> the pipeline's name."""
    is_output_rank: bool = True
    """Whether this rank returns results. One of the ranks with the same rows does."""
    sampled_by: str | None
    """The rollout node whose responses the op processes."""
    metric_prefix: str

    @property
    def rows(self) -> np.ndarray:
        """Ids of the rows that the rank returns, for an op with one output row per input row, int64."""
        parts = [part.rows for part in self.parts] if self.is_output_rank else []
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceWork(TaskWork):
    """Reads prompts from the data set."""

    prompts: tuple[int, ...] = ()
    """Ids of the prompts to read, in order. A validation reads all of its sets."""
    ahead: tuple[int, ...] = ()
    """Ids of prompts that the next step probably reads."""
    first_group: int = 0
    """Number of the first group. Groups of earlier rounds have smaller numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferWork(TaskWork):
    """Keeps the step's groups, and adds groups of earlier steps to them."""

    first_group: int
    """Number of the first group that is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceWork(TaskWork):
    """Writes the step's batch to a file, or reads it from there."""

    path: str
    explorer: str = ""
    """Only for a part that writes: its name."""
    group_size: int
    """See `dagrl.orchestrator.steps.batch_index.BatchIndex`."""
    prompt_ids: np.ndarray
    """Only for a part that writes: the prompts of its groups, int64 [groups]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageWork(TaskWork):
    """Computes advantages."""

    kl_weight: float | None = None
    """Weight of the KL penalty in this step. Default: the node's coefficient."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """Only of ``estimator: rae``: role -> its baseline before this step."""


class RolloutId(NamedTuple):
    """Identifies one attempt of a rollout."""

    step: int
    task: str
    round: int = 0
    attempt: int = 0
    """Earlier attempts of the rollout that lost a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWork(TaskWork):
    """Samples responses to a chunk of prompts. Outputs are streamed, and several chunks run at once."""

    round: int = 0
    """Dynamic-sampling round, from 0."""
    attempt: int = 0
    weights: PendingWeights | None = None
    """Weights to wait for before sampling. Default: start with the current ones."""
    gather_s: float = 0.0
    """Seconds that finished responses wait for others, so that one message carries them."""
    begun: dict[int, Begun] = field(default_factory=dict)
    """Group -> its partial responses."""

    @property
    def rollout(self) -> RolloutId:
        return RolloutId(self.step, self.task, self.round, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork(TaskWork):
    """Runs on an engine that does not generate."""

    cache_as: CacheKey = b""
    """The worker caches its output under this key until the step is committed. Default: no caching."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreWork(EngineWork):
    """A forward pass: log-probs, values or scores."""

    frozen: bool = False
    """Whether to use the engine's start weights."""
    averaged: bool = False
    """Whether to use the moving average of its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWork(EngineWork):
    """An update, or a piece of one."""

    begins: bool = True
    """Whether this is the first piece."""
    ends: bool = True
    """Whether this is the last piece."""
    publish: str | None = None
    """The folder to write the new weights to, for explorers. Default: none."""
