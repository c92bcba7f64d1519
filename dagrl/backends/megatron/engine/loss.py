"""The objective's loss, micro-batch by micro-batch, as parts of one loss over all ranks' rows. `step` runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

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
"""What megatron's schedule calls with the model's output on a micro-batch."""


@dataclass(frozen=True, slots=True)
class GlobalLoss:
    """An objective on this data-parallel rank's rows, with weights that know all ranks' rows."""

    objective: Objective[Any]
    batch: Batch
    weights: Column
    """Weight of each response token (or row, with a reward head) in the loss over all ranks' rows, float32."""
    totals: tuple[float, ...]
    """The objective's totals over all ranks' rows."""
    of_values: bool
    """The model's output is what a value or reward head says."""

    @staticmethod
    def over_all_ranks(objective: Objective[Any], batch: Batch, *, of_values: bool) -> GlobalLoss:
        """Sum up what all ranks' rows weigh. Collective."""
        weights, shares = objective.token_weights(batch)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        totals = torch.tensor(shares, dtype=torch.float64, device=device)
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        normalizer, *_ = told = tuple(totals.tolist())
        # Where no rank has anything to train on, all weights are 0, and so is the loss.
        normalized = Column(
            (weights.values.astype(np.float64) / (normalizer or 1.0)).astype(np.float32), weights.offsets
        )
        return GlobalLoss(objective, batch, normalized, told, of_values)

    def of(self, micro_batch: MicroBatch) -> LossFunction:
        """The loss of a micro-batch, out of the model's output on it.

        What it takes of the batch goes to the device now, before the model runs: later, a copy would have the host wait
        for all that the device has still to do.
        """
        device = micro_batch.row.device

        def on_device(column: Column) -> torch.Tensor:
            return torch.from_numpy(column.take(micro_batch.rows).values).to(device, non_blocking=True)

        weight = on_device(self.weights)
        # Nothing is asked of a micro-batch without rows, whose rank may have none of the columns.
        names = self.objective.columns if len(micro_batch.rows) else ()
        columns = {name: on_device(self.batch[name]) for name in names}
        return lambda output: self._share(output, weight, columns, micro_batch.row)

    def _share(
        self, output: torch.Tensor, weight: torch.Tensor, columns: Mapping[str, torch.Tensor], row: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Tallies]:
        """A micro-batch's part, in the form that megatron's schedule takes: loss, token count, what to keep."""
        # The weights are divided by the global normalizer: there is nothing left for megatron to divide by.
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


def loss_is_elsewhere(output: torch.Tensor) -> NoReturn:
    """What stands for the loss on all but the last pipeline stage, where nobody asks for it."""
    raise AssertionError("only the last pipeline stage has a loss")


def join_replicas(metrics: Mapping[str, Stat]) -> dict[str, Stat]:
    """Metrics of all data-parallel ranks together, the same on each to the bit. Ranks may lack some. Collective."""
    group = parallel_state.get_data_parallel_group()
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, dict(metrics), group=group)
    return merge(parts)
