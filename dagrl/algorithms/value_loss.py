"""The critic's objective: squared errors of values, clipped around the values from before the update.

It implements `dagrl.backends.base.Objective` over `ValueTokens`, for engines with a value head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dagrl.algorithms.aggregation import batch_parts, token_weights
from dagrl.algorithms.rows import RowReducer
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.data.tally import tally, tally_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dagrl.backends.base import ValueTokens
    from dagrl.config.schema import Aggregation
    from dagrl.config.schema.nodes.distillation import WholeDivergence

_RETURN, _ERROR = "critic/return", "critic/error_before"
_AS_GOOD_AS_CONSTANT = 1e-12
"""Variance of returns, relative to their mean square, below which they count as constant."""


def value_loss(
    value: torch.Tensor, old_value: torch.Tensor, returns: torch.Tensor, *, cliprange: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error of each value, shape [T], and a mask of clipped gradients, bool.

    0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2): the gradient of a value that has moved by more than c is
    0 in that direction. As in OpenAI's baselines of PPO (arXiv 1707.06347), and described in "Implementation matters in
    deep policy gradients" (arXiv 2005.12729, section 3, item 1). A `cliprange` of 0 means no bound. Only `value` has a
    gradient.
    """
    free = (value - returns).square()
    if not cliprange:
        return 0.5 * free, torch.zeros_like(value, dtype=torch.bool)
    near = torch.minimum(torch.maximum(value, old_value - cliprange), old_value + cliprange)
    bounded = (near - returns).square()
    clipped = bounded > free
    return 0.5 * torch.where(clipped, bounded, free), clipped


class ValueObjective:
    """The value loss over the response tokens of a batch, weighted like a policy loss."""

    needs_entropy = False
    candidates: str | None = None
    whole_divergence: WholeDivergence | None = None
    temperature = 1.0

    def __init__(
        self, *, cliprange: float, aggregation: Aggregation, longest_response: int, has_shares: bool = False
    ) -> None:
        """`longest_response`: largest number of tokens of a response; see `token_weights`.

        `has_shares`: whether there is a column ``trajectory_share``.
        """
        self.columns: tuple[str, ...] = ("value", "return", *(("trajectory_share",) if has_shares else ()))
        self.cliprange = cliprange
        self.aggregation = aggregation
        self.longest_response = longest_response

    def token_weights(self, batch: Batch) -> tuple[Column, tuple[float, ...]]:
        """Weights from ``response_mask``, and the normalizer's share of `batch`."""
        shares = batch["trajectory_share"].values if "trajectory_share" in batch else None
        weights, normalizer = token_weights(batch["response_mask"], self.aggregation, self.longest_response, shares)
        return weights, (normalizer,)

    def token_loss(self) -> None:
        """There are no logits."""

    def __call__(self, tokens: ValueTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The micro-batch's share of the loss, and tallies for `with_explained_variance`."""
        counted = tokens.weight > 0
        value = tokens.value.detach()
        # Inactive tokens may have any value: 0 * inf would make the sum NaN.
        before, returns = (torch.where(counted, tokens.columns[name], value) for name in ("value", "return"))
        loss, clipped = value_loss(tokens.value, before, returns, cliprange=self.cliprange)
        of_tokens = {"critic/clip_fraction": clipped, _RETURN: returns, _ERROR: returns - before}
        share, rows = tokens.columns.get("trajectory_share"), RowReducer(tokens.row, counted)
        parts = batch_parts(tokens.weight, rows, self.aggregation, self.longest_response, share)
        metrics = {"critic/loss": tally_mean(loss, tokens.weight, parts)} | tally(of_tokens, counted)
        return (tokens.weight * loss).sum(), metrics


def with_explained_variance(stats: Mapping[str, Stat]) -> dict[str, Stat]:
    """Replaces intermediate metrics of a whole batch by ``critic/explained_variance``.

    It is 1 - Var[R - V] / Var[R] over active tokens, with V from before the update: 1 for a perfect critic, 0 for a
    constant one, negative for a harmful one. Omitted if all returns are equal.
    """
    metrics = {name: stat for name, stat in stats.items() if name not in (_RETURN, _ERROR)}
    returns, errors = stats.get(_RETURN), stats.get(_ERROR)
    if returns is None or errors is None or not returns.count:
        return metrics
    if returns.std**2 > _AS_GOOD_AS_CONSTANT * returns.squares / returns.count:
        metrics["critic/explained_variance"] = Stat.of([1 - (errors.std / returns.std) ** 2])
    return metrics
