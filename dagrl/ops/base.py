"""What an op gets and gives: the contract between a worker and the functions of this package."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.backends.base import NO_WEIGHTS
from dagrl.config.schema import NodeBase, Pipeline, RolloutNode, SamplingSpec
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat, merge
from dagrl.graph.offline import is_offline, rows_per_prompt
from dagrl.graph.rollouts import leading_rollout, rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class OpInput:
    """Rows that an op takes together: a shard, or a mini-batch of an update. Only this data-parallel rank's rows."""

    index: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Output:
    """What an op made of some rows."""

    shards: tuple[int, ...]
    """Shards that this output belongs to; a hint for the timeline."""
    rows: np.ndarray
    """Row ids, int64 [rows]."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """By the op's own names."""
    stats: Mapping[str, Stat] = field(default_factory=dict)
    """Metrics, to be merged over shards and ranks."""
    facts: Mapping[str, int] = field(default_factory=dict)
    """Small numbers that the driver keeps, such as the place in the data set."""
    positions: np.ndarray | None = None
    """Of the source: where the groups' prompts stand in the data set, int64 [groups]."""
    sampled: int = 0
    """Of a rollout: tokens that were sampled for it."""
    unfinished: bool = False
    """Of a rollout: groups that were aborted; the columns hold what there is of them, where that is kept."""
    uncounted: tuple[str, ...] = ()
    """Columns of tokens that rows do not get longer by: they stand in for others, or wait to do so."""

    @staticmethod
    def together(outputs: Sequence[Output]) -> Output:
        """Several outputs of a rollout as one; there is at least one, and all are finished or none is."""
        if len(outputs) == 1:
            return outputs[0]
        whole = Batch.concat([Batch(output.rows, output.columns) for output in outputs])
        return Output(
            outputs[0].shards,
            whole.rows,
            whole.columns,
            merge(output.stats for output in outputs),
            sampled=sum(output.sampled for output in outputs),
            unfinished=outputs[0].unfinished,
        )


class Resources:
    """What a worker keeps from one task to the next: the pipeline, its tokenizer, its data."""

    def __init__(self, pipeline: Pipeline, folder: Path | None, run_dir: Path) -> None:
        self.pipeline = pipeline
        self.folder = folder
        """Where the user's own modules are."""
        self.run_dir = run_dir
        self.cache: dict[str, Any] = {}
        """What an op loads once, by a key of its own."""
        # Reentrant: what is loaded may want something that is loaded once itself.
        self._loading = threading.RLock()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""
        from dagrl.data.tokenizer import load_tokenizer

        return load_tokenizer(self.pipeline.model)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` returned when it was first asked for under this key."""
        with self._loading:
            if key not in self.cache:
                self.cache[key] = make()
            return self.cache[key]


@dataclass(frozen=True, slots=True)
class Context:
    """Where and when an op runs."""

    node: NodeBase | None
    """The declared node; None for the implicit ones."""
    step: int
    validation: bool
    position: int
    """Prompts of the data set that earlier steps have used."""
    shards: int
    """Shards in the step's batch."""
    resources: Resources
    engine: Any = None
    """This rank's engine, where the op has one."""
    frozen: bool = False
    """Use the engine's start weights."""
    replica: int = 0
    """This worker's data-parallel rank."""
    carried: tuple[int, ...] = ()
    """Places in the data set of prompts that come before those at `position`."""
    first_group: int = 0
    """Of the source: the number of its first group; those before are of earlier rounds."""
    prompts: int | None = None
    """Of the source: how many it takes. Default: those of a first round."""
    sampled_by: str | None = None
    """The rollout node whose responses the op works on. Default: the leading one."""
    begins: bool = True
    """Of an update in pieces: whether this is the first of them."""
    ends: bool = True
    """Whether it is the last."""
    kl_weight: float | None = None
    """Of advantages: the weight of the divergence in this step. Default: as the node says."""
    version: int = NO_WEIGHTS
    """Of a rollout: the version of weights that may still be on their way, on which it begins."""
    begun: Mapping[int, Batch] = field(default_factory=dict)
    """Group -> what an earlier step has sampled for it: the columns of a rollout, rows in the order of the group's."""

    @property
    def pipeline(self) -> Pipeline:
        """The whole pipeline."""
        return self.resources.pipeline

    @property
    def samples_per_prompt(self) -> int:
        """Rows of a group."""
        return rows_per_prompt(self.pipeline, validation=self.validation)

    @property
    def rollout(self) -> RolloutNode:
        """The rollout whose responses the op works on."""
        return rollouts(self.pipeline)[self.sampled_by or leading_rollout(self.pipeline)]

    @property
    def sampling(self) -> SamplingSpec:
        """How the batch's tokens are drawn; in validation the likeliest, unless ``val_sampling`` says otherwise.

        Where nothing samples, responses are the data set's, ended by the tokenizer's end token.
        """
        if not rollouts(self.pipeline):
            return SamplingSpec(max_new_tokens=self.pipeline.data.max_response_tokens or 1)
        rollout = self.rollout
        if not self.validation:
            return rollout.sampling
        return rollout.val_sampling or rollout.sampling.model_copy(update={"temperature": 0.0})

    @property
    def temperature(self) -> float:
        """Temperature at which training samples are drawn; 1 where they are the likeliest tokens, or none is drawn."""
        if self.sampled_by is None and is_offline(self.pipeline):
            return 1.0
        return self.rollout.sampling.temperature or 1.0


Op = Callable[[Sequence[OpInput], Context], Iterator[Output]]
"""An op: parts in, outputs out, as they are ready."""
