"""What tests of several objectives need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.backends.base import ResponseTokens
from dagrl.data.batch import Batch, Column
from dagrl.data.tally import read_tallies

Outcome = tuple[float, dict[int, list[float]], dict[str, float]]
"""Loss, gradients of the log-probs by row, and means of the metrics."""


@pytest.fixture(scope="session")
def accumulated() -> Callable[[Sequence[Batch], Any], Outcome]:
    """``accumulated(parts, objective)``: a batch that comes in parts, as an engine accumulates them.

    The parts have a column ``policy``: the log-probs of their response tokens.
    """

    def run(parts: Sequence[Batch], objective: Any) -> Outcome:
        shares = [objective.token_weights(part) for part in parts]
        totals = tuple(np.sum([share for _, share in shares], axis=0).tolist())
        total, gradients, tallies = 0.0, {}, []
        for part, (weights, _) in zip(parts, shares, strict=True):
            logprob = torch.from_numpy(part["policy"].values.copy()).requires_grad_()
            tokens = ResponseTokens(
                logprob=logprob,
                entropy=None,
                weight=torch.from_numpy(weights.values).double() / (totals[0] or 1.0),
                columns={name: torch.from_numpy(part[name].values) for name in objective.columns},
                row=torch.from_numpy(np.repeat(np.arange(len(part)), part["policy"].lengths)),
                totals=totals,
            )
            loss, told = objective(tokens)
            loss.backward()
            total += loss.item()
            tallies.append(told)
            by_row = Column(logprob.grad.numpy(), part["policy"].offsets)
            gradients |= {int(row): by_row[place].tolist() for place, row in enumerate(part.rows)}
        return total, gradients, {name: stat.mean for name, stat in read_tallies(tallies).items()}

    return run
