"""What a run takes of one rank: tokens, operations, memory. `efficiency` makes metrics of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dagrl.backends.device_peaks import peak_flops_per_s
from dagrl.backends.families.flops import ModelFlops, model_flops
from dagrl.backends.families.registry import shape_of
from dagrl.config.schema import LogprobNode, Pipeline, RewardModelNode, TrainingNode, ValuesNode
from dagrl.data.batch import Batch, Column
from dagrl.ops.base import Output, Part
from dagrl.workers.messages import Effort, TaskWork

_Passing = LogprobNode | ValuesNode | RewardModelNode | TrainingNode
"""Nodes whose rows go through a model as they are."""


@dataclass(slots=True)
class Account:
    """What of a run has not been told yet."""

    tokens: int = 0
    flops: int | None = None


class Meter:
    """Counts for one rank of an engine: for each run in an account of its own, as several may be under way."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        # An engine whose model is in processes of its own leaves the GPU to them: to wait for it would take half a GiB.
        self._on_gpu = torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 0
        self._peak = peak_flops_per_s(torch.cuda.get_device_name()) if self._on_gpu else None
        self._costs: dict[str, ModelFlops | None] = {}

    def begin(self, work: TaskWork, parts: Sequence[Part], *, first: bool = True) -> Account:
        """A run begins, on these rows, or a further share of it.

        Ranks that do not hand in work on rows that another one speaks of.
        """
        account = Account()
        node = self._pipeline.nodes[work.node] if work.node else None
        if isinstance(node, _Passing) and not self._pipeline.engines[node.engine].reads_messages:
            batches = [part.batch for part in parts] if work.hands_in else []
            # Of a validation set, an op that trains tells the loss alone.
            epochs = node.epochs if isinstance(node, TrainingNode) and not work.validation else 0
            account.tokens = max(1, epochs) * sum(int(_row_lengths(batch).sum()) for batch in batches)
            account.flops = self._operations(node, batches, epochs)
        if self._on_gpu and first:
            torch.cuda.reset_peak_memory_stats()
        return account

    def settle(self) -> None:
        """Wait for what is still queued on the device: it is part of the time that a run takes."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def effort(self, account: Account, output: Output) -> Effort:
        """What the run has taken, as far as it has not been told with an earlier output."""
        tokens, flops = account.tokens + output.sampled, account.flops
        account.tokens, account.flops = 0, None if flops is None else 0
        memory = torch.cuda.max_memory_allocated() if self._on_gpu else None
        return Effort(tokens, flops, self._peak, memory)

    def _operations(self, node: _Passing, batches: Sequence[Batch], epochs: int) -> int | None:
        """Operations of the node's passes over the batches, training ones if there are `epochs`.

        None where nobody has counted those of the model.
        """
        spec = self._pipeline.engines[node.engine]
        if node.engine not in self._costs:
            self._costs[node.engine] = self._count(node.engine, spec.head)
        cost = self._costs[node.engine]
        if cost is None:
            return None
        total = 0
        for batch in batches:
            predictions = len(batch) if spec.head == "reward" else len(_responses(batch).values)
            if epochs:
                total += epochs * cost.train(_row_lengths(batch), predictions)
            else:
                total += cost.forward(_row_lengths(batch), predictions)
        return total

    def _count(self, engine: str, head: str) -> ModelFlops | None:
        from dagrl.backends.model_source import load_hf_config

        config = load_hf_config(self._pipeline.model_of(engine))
        try:
            return model_flops(shape_of(config.to_dict()), outputs=None if head == "lm" else 1)
        except ValueError:
            return None


def _row_lengths(batch: Batch) -> np.ndarray:
    return batch["prompt_tokens"].lengths + _responses(batch).lengths


def _responses(batch: Batch) -> Column:
    """What the policy has said, or what it is to learn from the data set."""
    return batch["response_tokens"] if "response_tokens" in batch else batch["demonstration"]
