"""What the driver and its workers say to each other: metadata and object refs, never the columns themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray

from dagrl.config.schema import Pipeline
from dagrl.data.stats import Stat
from dagrl.weight_sync.protocol import Offer, Sent

type Held = bytes
"""An object that a worker has already, by the name under which it keeps it: see `dagrl.workers.groups.object_cache`."""


@dataclass(frozen=True, slots=True)
class Source:
    """Rows that one task has put into the object store, and the columns wanted of them."""

    refs: tuple[ray.ObjectRef | Held, ...]
    """The blocks that hold any of them; a row that several hold is taken from the first."""
    columns: dict[str, str]
    """Column as the op calls it -> column as the blocks call it."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What an earlier step has sampled for a prompt's group."""

    ref: ray.ObjectRef
    rows: np.ndarray
    """Ids that the group's rows have in the object, int64, in their order."""


@dataclass(frozen=True, slots=True)
class PartWork:
    """Rows that a rank takes together, and where their columns lie."""

    index: int
    rows: np.ndarray
    """Row ids in the order in which the op gets them, int64."""
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Coming:
    """Weights on their way to a generator."""

    sync: int
    """Number of their sync."""
    version: int


@dataclass(frozen=True, slots=True)
class TaskWork:
    """One rank's share of a run."""

    step: int
    task: str
    op: str
    node: str | None
    """Declared node; None for the implicit ones."""
    validation: bool
    position: int
    """Prompts of the data set that earlier steps have used."""
    committed: int
    """Newest committed step: what was made in it and before is no longer needed."""
    shards: int
    parts: tuple[PartWork, ...]
    outputs: dict[str, str]
    """Column as the op calls it -> column as the pipeline calls it."""
    frozen: bool
    hands_in: bool
    """Whether this rank's results count: one of the ranks with the same rows."""
    streams: bool = False
    """Whether rows come out in pieces, in an order of their own, and several shares may be under way at once."""
    round: int = 0
    """Of a task that runs in rounds: which one, counted from 0."""
    attempt: int = 0
    """Of a run that streams: how often it was begun before, and lost a worker."""
    weights: Coming | None = None
    """Of a run that streams: those on which it begins, though they may not be there yet. Default: what there is."""
    gather_s: float = 0.0
    """Of a run that streams: how long what is finished waits for more, in seconds."""
    first_group: int = 0
    """Of the source: the number of its first group; those before are of earlier rounds."""
    prompts: int | None = None
    """Of the source: how many it takes. Default: those of a first round."""
    carried: tuple[int, ...] = ()
    """Of the source: places in the data set of the prompts that come first."""
    begun: dict[int, Begun] = field(default_factory=dict)
    """Of a rollout: group -> what there is of it already."""
    begins: bool = True
    """Of an update in pieces: whether this is the first of them."""
    ends: bool = True
    """Whether it is the last."""
    sampled_by: str | None = None
    """The rollout node whose responses it is about."""
    told_as: str = ""
    """What comes before the names of its metrics."""
    kl_weight: float | None = None
    """Of advantages: the weight of the divergence in this step. Default: as the node says."""
    keeps_as: Held = b""
    """Under which name the worker keeps the columns that it makes, until the step is committed. Default: not at all."""

    @property
    def rows(self) -> np.ndarray:
        """Ids of the rows that the rank hands in, of an op that makes a row of each, int64."""
        parts = [part.rows for part in self.parts] if self.hands_in else []
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Span:
    """When something ran, in seconds since the epoch."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Effort:
    """What a part of a run has taken of one rank of an engine."""

    tokens: int
    """Tokens that went through the model, or that it sampled; 0 from ranks that do not hand in."""
    flops: int | None
    """Model operations on those tokens, on all ranks that share them; None where they are not counted."""
    peak_flops_per_s: float | None
    """What the rank's device could do at best; None where that is not known."""
    peak_bytes: int | None
    """Most device memory in use since the run began; None without a GPU."""


@dataclass(frozen=True, slots=True)
class Block:
    """What a rank has made of some rows, or finished without columns."""

    rows: np.ndarray
    """Row ids, int64; empty from ranks that do not hand in."""
    ref: Any
    """The object that holds the columns, if there are any, and perhaps those of other blocks; in the worker that has
    made them, the batch itself."""
    tokens: np.ndarray | None
    """Tokens that the block adds to each row, int64: what rows cost to process; None where it adds none."""
    span: Span
    shards: tuple[int, ...] = ()
    stats: dict[str, Stat] = field(default_factory=dict)
    facts: dict[str, int] = field(default_factory=dict)
    effort: Effort | None = None
    """None on the host."""
    positions: np.ndarray | None = None
    """Of the source: where the groups' prompts stand in the data set, int64 [groups]."""
    unfinished: bool = False
    """Groups that were aborted; the object, if there is one, holds what there is of them."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life of a worker that generates: when it begins with a share, then each second in which it gets on."""

    sampled_tokens: int
    """Tokens that its engine has sampled since it was built."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker that generates has to say at one time."""

    messages: tuple[Block | Beat, ...]
    """One block with columns at most."""
    last: bool = False
    """Whether it says nothing more of this share."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a worker is."""

    host: str
    address: str
    port: int
    """One that it listens on from the start, so that others can meet there."""
    pid: int
    gpus: tuple[str, ...]
    """GPUs that it may use, as CUDA_VISIBLE_DEVICES names them."""
    machine: str = ""
    """Ray's id of the host."""


@dataclass(frozen=True, slots=True)
class StartEngine:
    """All that a worker needs to become one rank of an executor."""

    pipeline: Pipeline
    folder: Path | None
    """Where the user's own modules are."""
    run_dir: Path
    engine: str | None
    """The engine to hold; None on the host."""
    rank: int
    world_size: int
    replica: int
    trained: bool
    keeps_start_weights: bool
    master_addr: str = ""
    """Where the ranks of the engine meet, or those of one of its servers."""
    master_port: int = 0
    gpus: tuple[str, ...] = ()
    """GPUs of the processes that the worker starts, where it starts some."""


@dataclass(frozen=True, slots=True)
class Handed:
    """What a rank of a trainer has handed out of its weights."""

    seconds: float
    """How long it took."""
    nbytes: int
    """Of all weights."""
    sent: Sent | None = None
    """On the ways that are not through the object store."""
    refs: tuple[ray.ObjectRef, ...] = ()
    """Through the object store: the buckets, from rank 0."""


@dataclass(frozen=True, slots=True)
class Take:
    """What a follower's workers are told: to take weights, and from where."""

    number: int
    """Of the sync."""
    version: int
    offers: tuple[Offer | None, ...] = ()
    """Of the trainer's ranks, in order."""
    handed: ray.ObjectRef | None = None
    """Or else what the first rank will have `Handed` out, through the object store."""
    keeps_room: bool = False
    """See `WeightRoute.keeps_room`."""
