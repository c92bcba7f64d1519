"""Training step shared by the ops that learn from the data set's responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from dagrl.backends.base import Objective, ResponseTokens
from dagrl.config.schema import DemonstrationNode
from dagrl.data.batch import Batch
from dagrl.data.stats import Stat
from dagrl.data.tally import read_tallies
from dagrl.ops.base import Context, OpInput, Output


def learn(parts: Sequence[OpInput], context: Context, objective: Objective[ResponseTokens]) -> Iterator[Output]:
    """Train on the mini-batches in order, or compute the objective's metrics of a validation batch; yield the
    metrics.
    """
    batches = [part.batch.with_columns({"response_tokens": part.batch["demonstration"]}) for part in parts]
    if context.validation:
        (batch,) = batches
        stats = _metrics(batch, objective, context)
    else:
        stats = context.train(batches, objective)
    yield Output((), np.concatenate([part.batch.rows for part in parts]), {}, stats)


def _metrics(batch: Batch, objective: Objective[ResponseTokens], context: Context) -> dict[str, Stat]:
    logprobs = context.trainer.logprobs(
        batch,
        temperature=objective.temperature,
        tokens_per_micro_batch=context.declared(DemonstrationNode).tokens_per_micro_batch,
    )
    # Weights are not divided by the global normalizer here, so that merging over ranks gives means over rows.
    weights, totals = objective.token_weights(batch)
    tokens = ResponseTokens(
        logprob=torch.from_numpy(logprobs.values),
        entropy=None,
        weight=torch.from_numpy(weights.values),
        columns={name: torch.from_numpy(batch[name].values) for name in objective.columns},
        row=torch.from_numpy(np.repeat(np.arange(len(batch)), logprobs.lengths)),
        totals=(1.0,) * len(totals),
    )
    _, metrics = objective(tokens)
    return read_tallies([metrics])
