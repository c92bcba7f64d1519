"""Imitation: the likelihood of given responses, alone or mixed with a policy's own samples.

Both classes implement `dagrl.backends.base.Objective`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from dagrl.algorithms.aggregation import token_weights
from dagrl.algorithms.objective import PolicyObjective
from dagrl.config.schema import Aggregation
from dagrl.data.batch import Batch, Column
from dagrl.data.tally import tally_mean

if TYPE_CHECKING:
    from dagrl.backends.base import ResponseTokens


class SftObjective:
    """Negative log-likelihood of all response tokens: supervised fine-tuning."""

    columns: tuple[str, ...] = ()
    needs_entropy = False
    candidates: str | None = None
    temperature = 1.0

    def __init__(self, aggregation: Aggregation, longest_response: int | None = None) -> None:
        """`longest_response`: largest number of tokens of a response, by which seq-mean-token-sum-norm divides."""
        self.aggregation = aggregation
        self.longest_response = longest_response

    def token_weights(self, batch: Batch) -> tuple[Column, tuple[float, ...]]:
        return self.weights(_ones(batch["response_tokens"]))

    def weights(self, mask: Column) -> tuple[Column, tuple[float, ...]]:
        """Weights and totals for the tokens in `mask`."""
        weights, normalizer = token_weights(mask, self.aggregation, self.longest_response)
        return weights, (normalizer,)

    def __call__(self, tokens: ResponseTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The micro-batch's share of the loss, and ``loss/sft``, its mean with the same weights."""
        return self._share(tokens), {"loss/sft": tally_mean(-tokens.logprob, tokens.weight)}

    def token_loss(self) -> Callable[[ResponseTokens], torch.Tensor]:
        return self._share

    def _share(self, tokens: ResponseTokens) -> torch.Tensor:
        return -(tokens.weight * tokens.logprob).sum()


class MixedObjective:
    """(1 - mu) policy loss on the policy's own rows + mu NLL on an expert's: MIX of Trinity-RFT (arXiv 2505.17826).

    Expert rows have ``is_expert`` 1. Each part is averaged over its own rows of the mini-batch: the policy's by its
    loss's aggregation, the expert's over the tokens of a response, then over responses.
    """

    def __init__(self, policy: PolicyObjective, mu: float) -> None:
        self.policy, self.mu = policy, mu
        self._expert = SftObjective("seq-mean-token-mean")
        self.columns = (*policy.columns, "is_expert")
        self.needs_entropy = policy.needs_entropy
        self.candidates = policy.candidates
        self.temperature = policy.temperature

    def token_weights(self, batch: Batch) -> tuple[Column, tuple[float, ...]]:
        """Weights of both parts on their own rows. Totals: the policy's, its normalizer first, then the expert's."""
        mask = batch["response_mask"]
        is_expert = np.repeat(batch["is_expert"].values > 0, mask.lengths)
        own = batch.with_columns({"response_mask": Column(np.where(is_expert, 0.0, mask.values), mask.offsets)})
        weights, totals = self.policy.token_weights(own)
        imitated, others = self._expert.weights(Column(np.where(is_expert, mask.values, 0.0), mask.offsets))
        return Column(weights.values + imitated.values, mask.offsets), (*totals, *others)

    def __call__(self, tokens: ResponseTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The micro-batch's share of both, and the metrics of both, each over its own rows."""
        sampled, imitated = self._parts(tokens)
        policy, metrics = self.policy(sampled)
        expert, expert_metrics = self._expert(imitated)
        return (1 - self.mu) * policy + self.mu * expert, metrics | expert_metrics

    def token_loss(self) -> Callable[[ResponseTokens], torch.Tensor] | None:
        policy, expert = self.policy.token_loss(), self._expert.token_loss()
        if policy is None:
            return None

        def share(tokens: ResponseTokens) -> torch.Tensor:
            sampled, imitated = self._parts(tokens)
            return (1 - self.mu) * policy(sampled) + self.mu * expert(imitated)

        return share

    @staticmethod
    def _parts(tokens: ResponseTokens) -> tuple[ResponseTokens, ResponseTokens]:
        """The tokens with the weights of the policy's loss, and with those of the expert's."""
        is_expert = tokens.columns["is_expert"][tokens.row] > 0
        nothing = torch.zeros_like(tokens.weight)
        *totals, imitated = tokens.totals
        # All weights were divided by the policy's normalizer, or by 1 if that is 0.
        weight = torch.where(is_expert, tokens.weight * (totals[0] or 1.0) / (imitated or 1.0), nothing)
        own = replace(tokens, weight=torch.where(is_expert, nothing, tokens.weight), totals=tuple(totals))
        return own, replace(tokens, weight=weight)


def _ones(column: Column) -> Column:
    return Column(np.ones(len(column.values), dtype=np.float32), column.offsets)
