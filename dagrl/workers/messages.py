"""Messages between the driver and its workers: metadata and object refs, never the columns themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dagrl.config.schema import Pipeline
from dagrl.data.stats import Stat
from dagrl.scheduler.intervals import Interval
from dagrl.scheduler.plan import WorkerId
from dagrl.weight_sync.protocol import Offer, SendReport

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
    """The op's name of a column -> its name in the blocks."""


@dataclass(frozen=True, slots=True)
class PartWork:
    """Rows that a rank processes together, and where to read their columns."""

    index: int
    rows: np.ndarray
    """Row ids in the order in which the op gets them, int64."""
    sources: tuple[ColumnSource, ...]


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """Tokens that an earlier step has sampled for a group."""

    ref: ray.ObjectRef
    rows: np.ndarray
    """Ids of the group's rows in the object, int64, in order."""


@dataclass(frozen=True, slots=True)
class PausedGroup:
    """Agents or responses of several turns that an earlier step has begun for a group.

    They are in the memory of a worker; after its end, they begin again.
    """

    worker: WorkerId
    step: int
    group: int
    """The group in that step."""


type Begun = PartialRollout | PausedGroup
"""Responses of a group that an earlier step has begun."""


@dataclass(frozen=True, slots=True)
class PendingWeights:
    """Weights that are being sent to a generator."""

    sync: int
    version: int


# -- work, by kind


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWork:
    """One rank's share of a run. Ops without an engine need no more than this."""

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
    """Whether this rank returns results. Of the ranks with the same rows, one does."""
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

    position: int
    """Prompts of the data set that earlier steps have used."""
    prompts: int | None = None
    """How many to read. Default: the number of a first round."""
    carried: tuple[int, ...] = ()
    """Data set positions of prompts that an earlier step has left unfinished. They come first."""
    first_group: int = 0
    """Number of the first group. Earlier rounds have smaller ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageWork(TaskWork):
    """Computes advantages."""

    kl_weight: float | None = None
    """Weight of the KL penalty in this step. Default: the node's coefficient."""


class RolloutId(NamedTuple):
    """Identifies one attempt of a rollout."""

    step: int
    task: str
    round: int = 0
    attempt: int = 0
    """How often the rollout was started before and lost a worker."""


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
    """Group -> what exists of its responses."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWork(EngineWork):
    """An update, or a piece of one."""

    begins: bool = True
    """Whether this is the first piece."""
    ends: bool = True
    """Whether this is the last piece."""


# -- results


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, operations and memory of one rank."""

    tokens: int
    """Tokens that went through the model, or that it sampled. 0 from ranks that are not output ranks."""
    flops: int | None
    """Model operations on those tokens, over all ranks that share them. None if they are not counted."""
    peak_flops_per_s: float | None
    """The device's peak. None if unknown."""
    peak_bytes: int | None
    """Peak device memory since the run began. None without a GPU."""


@dataclass(frozen=True, slots=True)
class Block:
    """The output of a rank for some rows."""

    rows: np.ndarray
    """Row ids, int64. Empty if the rank is not an output rank."""
    ref: Any
    """The object with the columns, which other blocks may share, or None without columns. In the worker that has
    computed them it is the batch itself."""
    tokens: np.ndarray | None
    """Tokens that the block adds to each row, int64; load balancing counts them. None if it adds none."""
    start: float
    end: float
    """When the work started and ended, in seconds since the epoch."""
    shards: tuple[int, ...] = ()
    stats: dict[str, Stat] = field(default_factory=dict)
    facts: dict[str, int] = field(default_factory=dict)
    usage: Usage | None = None
    """None without an engine."""
    positions: np.ndarray | None = None
    """Data set positions of the groups' prompts, int64 [groups], from the source."""
    unfinished: bool = False
    """Whether the groups were aborted. The object, if there is one, holds their partial rollouts."""

    @property
    def span(self) -> Interval:
        return Interval(self.start, self.end)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Progress of a worker that generates: sent when it starts a chunk, then each second in which it advances."""

    sampled_tokens: int
    """Tokens that the engine has sampled since it was built."""


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """One message of a streaming task."""

    items: tuple[Block | Heartbeat, ...]
    """At most one block has columns."""
    last: bool = False
    """Whether the stream of this chunk ends here."""


# -- workers and weights


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Where a worker runs."""

    host: str
    address: str
    port: int
    """The worker listens on it from the start, so that other ranks can connect."""
    pid: int
    gpus: tuple[str, ...]
    """GPUs that it may use, as in CUDA_VISIBLE_DEVICES."""
    machine: str = ""
    """Ray's node id."""
    gpu: str = ""
    """The driver's name for its GPUs; empty without any."""


@dataclass(frozen=True, slots=True)
class StartEngine:
    """All that a worker needs to become one rank of an executor."""

    pipeline: Pipeline
    folder: Path | None
    """Folder of the user's own modules."""
    run_dir: Path
    engine: str | None = None
    """The engine to build. None for CPU workers."""
    rank: int = 0
    world_size: int = 1
    replica: int = 0
    trained: bool = False
    keeps_start_weights: bool = False
    master_addr: str = ""
    """Rendezvous address of the engine's ranks, or of one server's ranks."""
    master_port: int = 0
    gpus: tuple[str, ...] = ()
    """GPUs of the processes that the worker starts, if it starts any."""


@dataclass(frozen=True, slots=True)
class SendResult:
    """Weights that one rank of a trainer has sent in a weight sync."""

    seconds: float
    nbytes: int
    """Size of all weights."""
    sent: SendReport | None = None
    """Over CUDA IPC and NCCL."""
    refs: dict[int, ray.ObjectRef] = field(default_factory=dict)
    """Through the object store: the buckets that this rank owns, by index."""


@dataclass(frozen=True, slots=True)
class UpdateWeightsRequest:
    """Asks a generator's worker to load new weights."""

    sync: int
    version: int
    offers: tuple[Offer | None, ...] = ()
    """Endpoints of the trainer's ranks, in order."""
    send_results: tuple[ray.ObjectRef, ...] = ()
    """Through the object store: the `SendResult` of each of the trainer's ranks."""
    keep_buffers: bool = False
    """See `WeightRoute.keep_buffers`."""
