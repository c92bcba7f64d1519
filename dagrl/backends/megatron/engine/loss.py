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
from dagrl.backends.megatron.engine.token_statistics import TokenScores
from dagrl.backends.megatron.engine.transfer import to_device
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat, merge
from dagrl.data.tally import Tallies

LossFunction = Callable[..., Any]
"""Called by Megatron's schedule with the model's output for a micro-batch."""
TokenLoss = Callable[[ResponseTokens], torch.Tensor]
"""See `Objective.token_loss`."""


@dataclass(frozen=True, slots=True)
class GlobalLoss:
    """An objective on this data-parallel rank's rows, with weights normalized over all ranks' rows."""

    objective: Objective[Any]
    batch: Batch
    weights: Column
    """Weight of each response token (or row, with a reward head), normalized over all ranks, float32."""
    totals: tuple[float, ...]
    of_values: bool

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

    def of(self, micro_batch: MicroBatch, token_loss: TokenLoss | None = None) -> MicroBatchLoss:
        """The loss function for a micro-batch; with `token_loss`, its gradient is that of the output's last row."""
        device = micro_batch.row.device

        def on_device(column: Column) -> torch.Tensor:
            return to_device(column.take(micro_batch.rows).values, device)

        weight = on_device(self.weights)
        # A rank without rows may lack the columns.
        names = self.objective.columns if len(micro_batch.rows) else ()
        columns = {name: on_device(self.batch[name]) for name in names}
        per_token = frozenset(name for name in names if self.batch[name].offsets is not None)
        return MicroBatchLoss(self, micro_batch, weight, columns, per_token, token_loss)


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """A micro-batch's part of a loss."""

    whole: GlobalLoss
    micro_batch: MicroBatch
    weight: torch.Tensor
    columns: Mapping[str, torch.Tensor]
    per_token: frozenset[str]
    """Columns with a value for each response token."""
    token_loss: TokenLoss | None = None

    def __call__(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Tallies]:
        """The part in the form of Megatron's schedule: loss, token count, metrics."""
        # Weights are divided by the global normalizer, so Megatron must not divide again.
        nothing = torch.zeros((), dtype=torch.int, device=output.device)
        if output.shape[1] == 0:
            return output.sum(), nothing, {}
        if self.whole.of_values:
            values = ValueTokens(output[0], self.weight, self.columns, self.micro_batch.row)
            loss, metrics = self.whole.objective(values)
            return loss, nothing, metrics
        entropy = output[1] if self.whole.objective.needs_entropy else None
        first, ids = 2 if self.whole.objective.needs_entropy else 1, self.micro_batch.candidates
        candidates = None if ids is None else output[first : first + ids.shape[1]].t()
        # It excludes candidates.
        divergence = None if self.whole.objective.whole_divergence is None else output[first]
        row, totals = self.micro_batch.row, self.whole.totals
        tokens = ResponseTokens(output[0], entropy, self.weight, self.columns, row, totals, candidates, divergence)
        if self.token_loss is None:
            loss, metrics = self.whole.objective(tokens)
            return loss, nothing, metrics
        with torch.no_grad():
            loss, metrics = self.whole.objective(tokens)
        return loss + output[-1, 0], nothing, metrics

    def slopes(self, part: slice, scores: TokenScores) -> TokenScores:
        """The gradient of `token_loss` for some of the outputs that this rank reads; see `linear_loss`."""
        assert self.token_loss is not None
        at, place = self.micro_batch.positions(part)
        asked = scores.map(lambda values: values.detach().requires_grad_())
        columns = {name: values[at] if name in self.per_token else values for name, values in self.columns.items()}
        row, totals = self.micro_batch.row[at], self.whole.totals
        with torch.enable_grad():
            read = asked if place is None else asked.map(lambda values: values[place])
            weight = self.weight[at]
            further = (read.candidates, read.divergence)
            some = ResponseTokens(read.logprob, read.entropy, weight, columns, row, totals, *further)
            given = [score for score in asked if score is not None]
            slopes = iter(torch.autograd.grad(self.token_loss(some), given, allow_unused=True))
        logprob, *others = (None if score is None else next(slopes) for score in asked)
        return TokenScores(torch.zeros_like(scores.logprob) if logprob is None else logprob, *others)


def join_replicas(metrics: Mapping[str, Stat]) -> dict[str, Stat]:
    """Metrics of all data-parallel ranks, merged, identical on each. Ranks may lack some. Collective."""
    group = parallel_state.get_data_parallel_group()
    parts: list[dict[str, Stat]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(parts, dict(metrics), group=group)
    return merge(parts)
