"""Messages between the driver and its workers: metadata and object refs, never the columns themselves.

The work of an op, which its context carries, is in `dagrl.ops.work`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.config.schema import Pipeline
from dagrl.data.batch import Batch
from dagrl.data.order.sampler import GroupOutcomes
from dagrl.data.stats import Stat
from dagrl.ops.base import Output
from dagrl.ops.work import TaskWork
from dagrl.scheduler.intervals import Interval
from dagrl.weight_sync.protocol import Offer, SendReport

if TYPE_CHECKING:
    import ray

BUCKET_BYTES = 2**28
"""Bytes of weights that are in memory together when they are written, read or digested."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, operations and memory of one rank."""

    tokens: int
    """Tokens that the model processed or sampled. 0 from ranks that are not output ranks."""
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
    """The object with the columns, which other blocks may share, or None without columns. In the worker that computed
    them it is the batch itself."""
    tokens: np.ndarray | None
    """Tokens that the block adds to each row, int64; load balancing counts them. None if it adds none."""
    start: float
    end: float
    """Start and end of the work, in seconds since the epoch."""
    shards: tuple[int, ...] = ()
    stats: dict[str, Stat] = field(default_factory=dict)
    usage: Usage | None = None
    """None without an engine."""
    prompts: np.ndarray | None = None
    """Ids of the groups' prompts, int64 [groups], from the source."""
    dropped: tuple[int, ...] = ()
    """Ids of prompts that are too long, from the source."""
    outcomes: GroupOutcomes | None = None
    """Outcomes of groups, from a filter or the step's sink."""
    counts: dict[str, np.ndarray] = field(default_factory=dict)
    """The account's counts of each row, int64 [rows], from a rollout or an update."""
    unfinished: bool = False
    """Whether the groups were aborted. The object, if there is one, holds their partial rollouts."""

    @property
    def span(self) -> Interval:
        return Interval(self.start, self.end)


def block_of(work: TaskWork, output: Output, begin: float, usage: Usage | None) -> Block:
    """The block of an op's output. The work on it began at `begin` and ends now."""
    end = time.time()
    if not work.is_output_rank:
        return Block(np.zeros(0, dtype=np.int64), None, None, begin, end, output.shards, usage=usage)
    columns = {work.outputs[name]: column for name, column in output.columns.items() if name in work.outputs}
    prefix = ("val/" if work.validation else "") + work.metric_prefix
    return Block(
        output.rows,
        Batch(output.rows, columns) if columns else None,
        None if output.unfinished else _added_tokens(output, work.outputs),
        begin,
        end,
        output.shards,
        {prefix + name: stat for name, stat in output.stats.items()},
        usage,
        output.prompts,
        output.dropped,
        output.outcomes,
        dict(output.counts),
        output.unfinished,
    )


def _added_tokens(output: Output, published: Mapping[str, str]) -> np.ndarray | None:
    """Tokens that the published columns add to each row: the lengths of ragged integer columns."""
    added = [
        column.lengths
        for name, column in output.columns.items()
        if name in published and name not in output.uncounted
        if column.offsets is not None and column.values.dtype == np.int64
    ]
    return np.sum(added, axis=0) if added else None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Progress of a worker that generates: sent when it starts a chunk, then each second in which it advances."""

    sampled_tokens: int
    """Tokens that the engine sampled since it was built."""


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
    """The place of a worker."""

    host: str
    address: str
    port: int
    """The worker listens on it from the start, so that other ranks can connect."""
    pid: int
    gpus: tuple[str, ...]
    """GPUs that it may use, as in CUDA_VISIBLE_DEVICES."""
    gpu: str = ""
    """The driver's name for its GPUs; empty without any."""


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Everything that a worker needs to become one rank of an executor."""

    pipeline: Pipeline
    folder: Path | None
    """Folder of the user's own modules."""
    run_dir: Path
    engine: str | None = None
    """The engine to build. None for CPU workers."""
    rank: int = 0
    world_size: int = 1
    trained: bool = False
    keeps_start_weights: bool = False
    master_addr: str = ""
    """Rendezvous address of the engine's ranks, or of one server's ranks."""
    master_port: int = 0
    gpus: tuple[str, ...] = ()
    """GPUs of the processes that the worker starts, if it starts any."""


@dataclass(frozen=True, slots=True)
class SendResult:
    """Weights that one rank of a trainer sent in a weight sync."""

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


@dataclass(frozen=True, slots=True)
class ColumnsToStore:
    """An object of Ray's store, and the columns of it that are recorded."""

    ref: ray.ObjectRef
    names: tuple[str, ...]
