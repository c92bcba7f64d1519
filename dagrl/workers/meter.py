"""Measures one rank: tokens, FLOPs and memory of each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dagrl.backends.families.flops import ModelFlops, model_flops
from dagrl.backends.families.registry import shape_of
from dagrl.backends.planning.gpus import gpu_of_driver
from dagrl.config.schema import LogprobNode, Pipeline, RewardModelNode, TrainingNode, ValuesNode
from dagrl.data.batch import Batch, Column
from dagrl.ops.base import OpInput, Output
from dagrl.ops.work import TaskWork
from dagrl.workers.messages import Usage

_Passing = LogprobNode | ValuesNode | RewardModelNode | TrainingNode
"""Nodes whose rows go through a model unchanged."""


@dataclass(slots=True)
class UsageCount:
    """The part of a run's usage that was not reported yet."""

    tokens: int = 0
    flops: int | None = None


class Meter:
    """Measures the runs of one rank. Several may be running, each with its own count."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        # If other processes hold the model, synchronizing here would create a CUDA context of half a GiB.
        self._on_gpu = torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 0
        # Unknown for a slice of a GPU (MIG), whose name does not tell its size.
        gpu = gpu_of_driver(torch.cuda.get_device_name()) if self._on_gpu else None
        self._peak = None if gpu is None else gpu.tflops * 1e12
        """Dense bfloat16 FLOPs per second, for the model FLOPs utilization."""
        self._costs: dict[str, ModelFlops | None] = {}

    def begin(self, work: TaskWork, parts: Sequence[OpInput], *, first: bool = True) -> UsageCount:
        """Begin a run, or with `first` unset another chunk of it. Only output ranks count their rows."""
        account = UsageCount()
        node = self._pipeline.nodes[work.node] if work.node else None
        engine = node.engine if isinstance(node, _Passing) else None
        if isinstance(node, _Passing) and engine and not self._pipeline.engines[engine].reads_messages:
            batches = [part.batch for part in parts] if work.is_output_rank else []
            # On a validation set, a training op only computes the loss.
            epochs = node.epochs if isinstance(node, TrainingNode) and not work.validation else 0
            account.tokens = max(1, epochs) * sum(int(_row_lengths(batch).sum()) for batch in batches)
            account.flops = self._operations(engine, batches, epochs)
        if self._on_gpu and first:
            torch.cuda.reset_peak_memory_stats()
        return account

    def settle(self) -> None:
        """Synchronize with the device, so that a run's time includes its kernels."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def usage(self, account: UsageCount, output: Output) -> Usage:
        tokens, flops = account.tokens + output.sampled, account.flops
        account.tokens, account.flops = 0, None if flops is None else 0
        memory = torch.cuda.max_memory_allocated() if self._on_gpu else None
        return Usage(tokens, flops, self._peak, memory)

    def _operations(self, engine: str, batches: Sequence[Batch], epochs: int) -> int | None:
        """FLOPs of an engine's passes over the batches; training passes if there are `epochs`. None if unknown."""
        spec = self._pipeline.engines[engine]
        if engine not in self._costs:
            self._costs[engine] = self._count(engine, spec.head)
        cost = self._costs[engine]
        if cost is None:
            return None
        total = 0
        for batch in batches:
            predictions = len(batch) if spec.head == "reward" else len(_responses(batch).values)
            if epochs:
                total += epochs * cost.train(_row_lengths(batch), predictions, frozen=spec.adapter_dropout is not None)
            else:
                total += cost.forward(_row_lengths(batch), predictions)
        return total

    def _count(self, engine: str, head: str) -> ModelFlops | None:
        from dagrl.model_files.library_model import load_hf_config

        config = load_hf_config(self._pipeline.model_of(engine))
        try:
            return model_flops(shape_of(config.to_dict()), outputs=None if head == "lm" else 1)
        except ValueError:
            return None


def _row_lengths(batch: Batch) -> np.ndarray:
    return batch["prompt_tokens"].lengths + _responses(batch).lengths


def _responses(batch: Batch) -> Column:
    return batch["response_tokens"] if "response_tokens" in batch else batch["demonstration"]
