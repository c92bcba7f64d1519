"""The objective's loss per micro-batch, as parts of one loss over all ranks' rows. Used by `step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dagrl.backends.base import Objective, ResponseTokens, ValueTokens
from dagrl.backends.megatron.engine.micro_batch import MicroBatch
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat, merge
from dagrl.data.tally import Tallies

LossFunction = Callable[..., Any]
"""Called by Megatron's schedule with the model's output for a micro-batch."""


@dataclass(frozen=True, slots=True)
class GlobalLoss:
    """An objective on this data-parallel rank's rows, with weights normalized over all ranks' rows."""

    objective: Objective[Any]
    batch: Batch
    weights: Column
    """Weight of each response token (or row, with a reward head), normalized over all ranks, float32."""
    totals: tuple[float, ...]
    """The objective's totals over all ranks' rows."""
    of_values: bool
    """Whether the output is that of a value or reward head."""

    @staticmethod
    def over_all_ranks(objective: Objective[Any], batch: Batch, *, of_values: bool) -> GlobalLoss:
        """Sum the totals over all ranks. Collective."""
        weights, shares = objective.token_weights(batch)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        totals = torch.tensor(shares, dtype=torch.float64, device=device)
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        summed = tuple(totals.tolist())
        # If no rank has anything to train on, all weights and the loss are 0.
        normalized = Column(
            (weights.values.astype(np.float64) / (summed[0] or 1.0)).astype(np.float32), weights.offsets
        )
        return GlobalLoss(objective, batch, normalized, summed, of_values)

    def of(self, micro_batch: MicroBatch) -> LossFunction:
        """The loss function for a micro-batch.

        Copies the columns to the device now, before the model runs: a later copy would wait for all queued kernels.
        """
        device = micro_batch.row.device

        def on_device(column: Column) -> torch.Tensor:
            return torch.from_numpy(column.take(micro_batch.rows).values).to(device, non_blocking=True)

        weight = on_device(self.weights)
        # A rank without rows may lack the columns.
        names = self.objective.columns if len(micro_batch.rows) else ()
        columns = {name: on_device(self.batch[name]) for name in names}
        return lambda output: self._share(output, weight, columns, micro_batch.row)

    def _share(
        self, output: torch.Tensor, weight: torch.Tensor, columns: Mapping[str, torch.Tensor], row: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Tallies]:
        """A micro-batch's part in the form of Megatron's schedule: loss, token count, metrics."""
        # Weights are divided by the global normalizer, so Megatron must not divide again.
        nothing = torch.zeros((), dtype=torch.int, device=output.device)
        if output.shape[1] == 0:
            return output.sum(), nothing, {}
        tokens: ResponseTokens | ValueTokens
        if self.of_values:
            tokens = ValueTokens(output[0], weight, columns, row)
        else:
            entropy = output[1] if self.objective.needs_entropy else None
            tokens = ResponseTokens(output[0], entropy, weight, columns, row, self.totals)
        loss, metrics = self.objective(tokens)
        return loss, nothing, metrics


def join_replicas(metrics: Mapping[str, Stat]) -> dict[str, Stat]:
    """Metrics of all data-parallel ranks, merged, identical on each. Ranks may lack some. Collective."""
    group = parallel_state.get_data_parallel_group()
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, dict(metrics), group=group)
    return merge(parts)
