"""Training step shared by the ops that learn from the data set's responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from dagrl.backends.base import Objective, ResponseTokens, TrainEngine
from dagrl.config.schema import DemonstrationNode
from dagrl.data.batch import Batch
from dagrl.data.stats import Stat
from dagrl.data.tally import read_tallies
from dagrl.ops.base import Context, OpInput, Output


def learn(parts: Sequence[OpInput], context: Context, objective: Objective[ResponseTokens]) -> Iterator[Output]:
    """Train on the mini-batches in order, or compute the objective's metrics of a validation batch; yield the
    metrics.
    """
    engine = context.trainer
    node = context.node
    assert isinstance(node, DemonstrationNode)
    batches = [part.batch.with_columns({"response_tokens": part.batch["demonstration"]}) for part in parts]
    if context.validation:
        (batch,) = batches
        stats = _told(batch, objective, engine, node.tokens_per_micro_batch)
    else:
        stats = engine.update(
            batches * node.epochs,
            objective,
            tokens_per_micro_batch=node.tokens_per_micro_batch,
            begins=context.begins,
            ends=context.ends,
        )
    yield Output((), np.concatenate([part.batch.rows for part in parts]), {}, stats)


def _told(
    batch: Batch, objective: Objective[ResponseTokens], engine: TrainEngine, tokens_per_micro_batch: int
) -> dict[str, Stat]:
    """The objective's metrics on this data-parallel rank's rows, to be merged over ranks."""
    logprobs = engine.logprobs(batch, temperature=objective.temperature, tokens_per_micro_batch=tokens_per_micro_batch)
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
