"""The interface between a worker and an op: inputs, outputs and context."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dagrl.backends.base import NO_WEIGHTS, AnyEngine, GenerateEngine, Objective, ScoreEngine, TrainEngine
from dagrl.config.schema import NodeBase, Pipeline, RolloutNode, SamplingSpec
from dagrl.config.schema.nodes.base import TrainingNode
from dagrl.data.batch import Batch, Column
from dagrl.data.order.sampler import GroupOutcomes
from dagrl.data.stats import Stat, merge
from dagrl.ops.work import PausedGroup, RolloutWork, ScoreWork, TaskWork, TrainWork

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class OpInput:
    """Rows of this data-parallel rank that an op processes together: a shard, or a mini-batch of an update."""

    index: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Output:
    """Result of an op for some rows."""

    shards: tuple[int, ...]
    """Shards that this output belongs to, for the timeline only."""
    rows: np.ndarray
    """Row ids, int64 [rows]."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    stats: Mapping[str, Stat] = field(default_factory=dict)
    """Metrics, to be merged over shards and ranks."""
    counts: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Only from a rollout or an update: counts of each row's tokens for the account, int64 [rows]."""
    prompts: np.ndarray | None = None
    """Only from the source: ids of the groups' prompts, int64 [groups]."""
    dropped: tuple[int, ...] = ()
    """Only from the source: ids of prompts that are too long. There are no rows then, and other prompts must replace
    these."""
    outcomes: GroupOutcomes | None = None
    """Outcomes of groups, from a filter or the step's sink."""
    sampled: int = 0
    """Only from a rollout: number of tokens sampled."""
    unfinished: bool = False
    """Only from a rollout: the groups were aborted; the columns hold their partial responses, if these are kept."""
    uncounted: tuple[str, ...] = ()
    """Token columns that do not count towards a row's length."""

    @staticmethod
    def together(outputs: Sequence[Output]) -> Output:
        """Join outputs of a rollout, at least one; all are finished, or none is."""
        if len(outputs) == 1:
            return outputs[0]
        whole = Batch.concat([Batch(output.rows, output.columns) for output in outputs])
        counted = dict.fromkeys(name for output in outputs for name in output.counts)
        return Output(
            outputs[0].shards,
            whole.rows,
            whole.columns,
            merge(output.stats for output in outputs),
            counts={
                name: np.concatenate([output.counts.get(name, np.zeros_like(output.rows)) for output in outputs])
                for name in counted
            },
            sampled=sum(output.sampled for output in outputs),
            unfinished=outputs[0].unfinished,
        )


class Resources:
    """State that a worker keeps between tasks: the pipeline, its tokenizer, its data."""

    def __init__(self, pipeline: Pipeline, folder: Path | None, run_dir: Path, rank: int = 0) -> None:
        self.pipeline = pipeline
        self.folder = folder
        """Folder of the user's own modules."""
        self.run_dir = run_dir
        self.rank = rank
        """The worker's rank of its engine."""
        self.at_close: list[Callable[[], None]] = []
        self.cache: dict[str, Any] = {}
        """Objects that ops load once, by key."""
        # Reentrant, because `make` may itself call `once`.
        self._loading = threading.RLock()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        from dagrl.model_files.tokenizer import load_tokenizer

        return load_tokenizer(self.pipeline.model)

    def once[Made](self, key: str, make: Callable[[], Made]) -> Made:
        """The result of `make`, called at the first use of `key`."""
        with self._loading:
            if key not in self.cache:
                self.cache[key] = make()
            return self.cache[key]


@dataclass(frozen=True, slots=True)
class Context:
    """One call of an op: its work, and the worker's state for it."""

    work: TaskWork
    resources: Resources
    engine: AnyEngine | None = None
    """This rank's engine, if the op has one."""
    begun: Mapping[int, Batch] = field(default_factory=dict)
    """Group -> partial responses from earlier steps: columns of a rollout, rows in the group's order."""
    aborted: Callable[[], bool] = lambda: False
    """Only for a rollout: whether it has to end early."""
    interrupted: Callable[[], bool] = lambda: False
    """Only for a rollout that has to end early: whether a further attempt continues its conversations."""

    def work_as[Kind: TaskWork](self, kind: type[Kind]) -> Kind:
        """The work of an op, of this kind."""
        assert isinstance(self.work, kind), f"{self.work.op} got {type(self.work).__name__}"
        return self.work

    @property
    def node(self) -> NodeBase | None:
        return self.pipeline.nodes[self.work.node] if self.work.node else None

    @property
    def step(self) -> int:
        return self.work.step

    @property
    def validation(self) -> bool:
        return self.work.validation

    @property
    def sampled_by(self) -> str | None:
        """The rollout node whose responses the op works on. None: the leading one."""
        return self.work.sampled_by

    @property
    def paused(self) -> dict[int, tuple[int, int]]:
        """Group -> step and group of conversations that this worker has paused."""
        begun = self.work.begun if isinstance(self.work, RolloutWork) else {}
        return {
            group: (begun_group.step, begun_group.group)
            for group, begun_group in begun.items()
            if isinstance(begun_group, PausedGroup)
        }

    # Validation has checked that the engine has the op's capability.

    @property
    def trainer(self) -> TrainEngine:
        return cast(TrainEngine, self.engine)

    @property
    def generator(self) -> GenerateEngine:
        return cast(GenerateEngine, self.engine)

    @property
    def scorer(self) -> ScoreEngine:
        return cast(ScoreEngine, self.engine)

    def scored_weights(self) -> AbstractContextManager[None]:
        """Context in which the engine has the weights of a forward pass."""
        work = self.work_as(ScoreWork)
        if work.averaged:
            return self.trainer.average_weights()
        return self.trainer.start_weights() if work.frozen else nullcontext()

    def train(self, mini_batches: Sequence[Batch], objective: Objective[Any]) -> dict[str, Stat]:
        """Take one optimizer step per mini-batch, as often as the node's ``epochs``; returns the metrics."""
        node, work = self.declared(TrainingNode), self.work_as(TrainWork)
        return self.trainer.update(
            [*mini_batches] * node.epochs,
            objective,
            tokens_per_micro_batch=node.tokens_per_micro_batch,
            begins=work.begins,
            ends=work.ends,
        )

    def declared[Node: NodeBase](self, kind: type[Node]) -> Node:
        assert isinstance(self.node, kind)
        return self.node

    @property
    def pipeline(self) -> Pipeline:
        return self.resources.pipeline

    @property
    def rollout(self) -> RolloutNode:
        return self.pipeline.rollouts[self.sampled_by or self.pipeline.leading_rollout]

    @property
    def policy_version(self) -> int:
        """The weight version at the start of a rollout: its work's version, or a newer one that has arrived since."""
        work = self.work
        begins_with = work.weights.version if isinstance(work, RolloutWork) and work.weights else NO_WEIGHTS
        return max(self.generator.policy_version, begins_with)

    @property
    def keeps_unfinished(self) -> bool:
        """Whether later steps continue unfinished responses of a rollout."""
        return self.rollout.partial_rollout and not self.validation

    @property
    def oldest_continued_step(self) -> int:
        """The earliest step whose unfinished responses may be continued by this step or one that overlaps with it."""
        age = self.rollout.partial_rollout_max_age if self.rollout.partial_rollout else 0
        return self.step - age - self.pipeline.schedule.max_staleness

    @property
    def sequences(self) -> int:
        """Rows of a trajectory; more than one only in training with an agent."""
        return self.rollout.rows_per_sample if self.pipeline.rollouts and not self.validation else 1

    @property
    def sampling(self) -> SamplingSpec:
        """Sampling parameters of rows without their own. Validation is greedy unless ``val_sampling`` is set.

        Without a rollout node, responses come from the data set and end with the tokenizer's end token.
        """
        if not self.pipeline.rollouts:
            return SamplingSpec(max_new_tokens=self.pipeline.data.max_response_tokens or 1)
        if not self.validation:
            return self.rollout.sampling
        return self.pipeline.val_sampling(self.sampled_by or self.pipeline.leading_rollout)

    @property
    def own_samplings(self) -> dict[str, SamplingSpec]:
        """Source or validation set with its own sampling -> sampling of its rows."""
        if not self.pipeline.rollouts:
            return {}
        sampled_by = self.sampled_by or self.pipeline.leading_rollout
        return self.pipeline.own_samplings(sampled_by, validation=self.validation)

    @property
    def samplings(self) -> tuple[SamplingSpec, ...]:
        data, own = self.pipeline.data, self.own_samplings
        return tuple(own.get(name, self.sampling) for name in (data.val_sets if self.validation else data.sources))

    @property
    def longest_response(self) -> int:
        return max(sampling.max_new_tokens for sampling in self.samplings or (self.sampling,))

    def sampling_of_rows(self, batch: Batch) -> list[SamplingSpec]:
        if not (own := self.own_samplings):
            return [self.sampling] * len(batch)
        return [own.get(name, self.sampling) for name in batch["data_set"].strings()]

    @property
    def temperature(self) -> float:
        """Temperature of training samples of sources without their own; 1 if sampled greedily, or not sampled."""
        if self.sampled_by is None and self.pipeline.is_offline:
            return 1.0
        return self.rollout.sampling.temperature or 1.0

    def with_temperatures(self, batch: Batch) -> Batch:
        """Training samples with the temperature of each row, float32, where sources have different ones."""
        offline = self.sampled_by is None and self.pipeline.is_offline
        if offline or {sampling.temperature or 1.0 for sampling in self.samplings} == {self.temperature}:
            return batch
        temperatures = [sampling.temperature or 1.0 for sampling in self.sampling_of_rows(batch)]
        return batch.with_columns({"temperature": Column(np.array(temperatures, dtype=np.float32))})


Op = Callable[[Sequence[OpInput], Context], Iterator[Output]]
"""An op: yields outputs for its inputs as they become ready."""
