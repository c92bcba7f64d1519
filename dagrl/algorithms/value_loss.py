"""The critic's objective: squared errors of values, clipped around the values from before the update.

It implements `dagrl.backends.base.Objective` over `ValueTokens`, for engines with a value head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dagrl.algorithms.aggregation import token_weights
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.data.tally import tally, tally_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    # The contract only: formulas do not need engines to run.
    from dagrl.backends.base import ValueTokens
    from dagrl.config.schema import Aggregation

_RETURN, _ERROR = "critic/return", "critic/error_before"
_AS_GOOD_AS_CONSTANT = 1e-12
"""Variance of returns, relative to their mean square, below which there is nothing to be explained."""


def value_loss(
    value: torch.Tensor, old_value: torch.Tensor, returns: torch.Tensor, *, cliprange: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error of each value, all of shape [T], and where a clip stopped its gradient, bool.

    0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2): a value that has moved away by more than c is not drawn
    further in that direction. As in OpenAI's baselines of PPO (arXiv 1707.06347); "Implementation matters in deep
    policy gradients" (arXiv 2005.12729, section 3, item 1) writes it down. A `cliprange` of 0 is no bound. Only `value`
    gets a gradient.
    """
    free = (value - returns).square()
    if not cliprange:
        return 0.5 * free, torch.zeros_like(value, dtype=torch.bool)
    near = torch.minimum(torch.maximum(value, old_value - cliprange), old_value + cliprange)
    bounded = (near - returns).square()
    clipped = bounded > free
    return 0.5 * torch.where(clipped, bounded, free), clipped


class ValueObjective:
    """The value loss over the response tokens of a batch, weighted as a policy's loss is."""

    columns: tuple[str, ...] = ("value", "return")
    needs_entropy = False
    temperature = 1.0

    def __init__(self, *, cliprange: float, aggregation: Aggregation, longest_response: int) -> None:
        """`longest_response`: the most tokens that a response is asked for; see `token_weights`."""
        self.cliprange = cliprange
        self.aggregation = aggregation
        self.longest_response = longest_response

    def token_weights(self, batch: Batch) -> tuple[Column, tuple[float, ...]]:
        """Weights from ``response_mask``, and the normalizer's share of `batch`."""
        weights, normalizer = token_weights(batch["response_mask"], self.aggregation, self.longest_response)
        return weights, (normalizer,)

    def __call__(self, tokens: ValueTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The micro-batch's share of the loss, and metrics as tallies, to be completed by `with_explained_variance`."""
        counted = tokens.weight > 0
        value = tokens.value.detach()
        # Values of tokens that do not count may be anything: 0 * inf would make the sum NaN.
        before, returns = (torch.where(counted, tokens.columns[name], value) for name in self.columns)
        loss, clipped = value_loss(tokens.value, before, returns, cliprange=self.cliprange)
        told = {"critic/clip_fraction": clipped, _RETURN: returns, _ERROR: returns - before}
        metrics = {"critic/loss": tally_mean(loss, tokens.weight)} | tally(told, counted)
        return (tokens.weight * loss).sum(), metrics


def with_explained_variance(stats: Mapping[str, Stat]) -> dict[str, Stat]:
    """The metrics of a whole batch, with ``critic/explained_variance`` in place of what it is worked out from.

    1 - Var[R - V] / Var[R] over the tokens that count, V from before the update: 1 for a critic that is always right, 0
    for one that says the same everywhere, below for one that does harm. Left out where all returns are the same.
    """
    told = {name: stat for name, stat in stats.items() if name not in (_RETURN, _ERROR)}
    returns, errors = stats.get(_RETURN), stats.get(_ERROR)
    if returns is None or errors is None or not returns.count:
        return told
    if returns.std**2 > _AS_GOOD_AS_CONSTANT * returns.squares / returns.count:
        told["critic/explained_variance"] = Stat.of([1 - (errors.std / returns.std) ** 2])
    return told
