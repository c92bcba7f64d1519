"""Imitation: the likelihood of given responses, alone or mixed with a policy's own samples.

All classes implement `dagrl.backends.base.Objective`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from dagrl.algorithms.aggregation import token_weights
from dagrl.algorithms.objective import PolicyObjective
from dagrl.algorithms.rows import RowReducer
from dagrl.config.schema import Aggregation
from dagrl.config.schema.nodes.distillation import WholeDivergence
from dagrl.data.batch import Batch, Column
from dagrl.data.tally import tally_mean

if TYPE_CHECKING:
    from dagrl.backends.base import ResponseTokens


class SftObjective:
    """Negative log-likelihood of all response tokens: supervised fine-tuning."""

    columns: tuple[str, ...] = ()
    needs_entropy = False
    candidates: str | None = None
    whole_divergence: WholeDivergence | None = None
    temperature = 1.0

    def __init__(
        self, aggregation: Aggregation, longest_response: int | None = None, *, metric: str = "loss/sft"
    ) -> None:
        """`longest_response`: largest number of tokens of a response, by which seq-mean-token-sum-norm divides."""
        self.aggregation = aggregation
        self.longest_response = longest_response
        self.metric = metric

    def token_weights(self, batch: Batch) -> tuple[Column, tuple[float, ...]]:
        return self.weights(_ones(batch["response_tokens"]))

    def weights(self, mask: Column) -> tuple[Column, tuple[float, ...]]:
        """Weights and totals for the tokens in `mask`."""
        weights, normalizer = token_weights(mask, self.aggregation, self.longest_response)
        return weights, (normalizer,)

    def __call__(self, tokens: ResponseTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The micro-batch's share of the loss, and as `metric` its mean with the same weights."""
        return self._share(tokens), {self.metric: tally_mean(-tokens.logprob, tokens.weight)}

    def token_loss(self) -> Callable[[ResponseTokens], torch.Tensor]:
        return self._share

    def _share(self, tokens: ResponseTokens) -> torch.Tensor:
        return -(tokens.weight * tokens.logprob).sum()


class _WithImitation(ABC):
    """A weighted sum of the policy's loss on its own tokens and the NLL of other tokens, each normalized."""

    def __init__(self, policy: PolicyObjective, imitation: SftObjective, column: str) -> None:
        """`column` marks the imitated tokens."""
        self.policy, self._imitation = policy, imitation
        self.columns: tuple[str, ...] = (*policy.columns, column)
        self.needs_entropy, self.candidates = policy.needs_entropy, policy.candidates
        self.whole_divergence = policy.whole_divergence
        self.temperature = policy.temperature
        self.factors = (1.0, 1.0)

    @abstractmethod
    def imitated(self, batch: Batch) -> np.ndarray:
        """The tokens of a batch that are imitated, bool; the policy's loss leaves them out."""

    @abstractmethod
    def is_imitated(self, tokens: ResponseTokens) -> torch.Tensor:
        """The imitated ones among tokens with a weight, bool [T]."""

    def token_weights(self, batch: Batch) -> tuple[Column, tuple[float, ...]]:
        """Weights of both parts on their own tokens. Totals: the policy's, its normalizer first, then the other's."""
        mask, imitated = batch["response_mask"], self.imitated(batch)
        own = batch.with_columns({"response_mask": Column(np.where(imitated, 0.0, mask.values), mask.offsets)})
        weights, totals = self.policy.token_weights(own)
        further, others = self._imitation.weights(Column(imitated.astype(np.float32), mask.offsets))
        return Column(weights.values + further.values, mask.offsets), (*totals, *others)

    def __call__(self, tokens: ResponseTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The micro-batch's share of both, and the metrics of both, each over its own tokens."""
        sampled, imitated = self._parts(tokens)
        policy, metrics = self.policy(sampled)
        other, other_metrics = self._imitation(imitated)
        return self.factors[0] * policy + self.factors[1] * other, metrics | other_metrics

    def token_loss(self) -> Callable[[ResponseTokens], torch.Tensor] | None:
        policy, imitation = self.policy.token_loss(), self._imitation.token_loss()
        if policy is None:
            return None

        def share(tokens: ResponseTokens) -> torch.Tensor:
            sampled, imitated = self._parts(tokens)
            return self.factors[0] * policy(sampled) + self.factors[1] * imitation(imitated)

        return share

    def _parts(self, tokens: ResponseTokens) -> tuple[ResponseTokens, ResponseTokens]:
        """The tokens with the weights of the policy's loss, and with the weights of the imitation."""
        is_imitated = self.is_imitated(tokens)
        nothing = torch.zeros_like(tokens.weight)
        *totals, others = tokens.totals
        # All weights were divided by the policy's normalizer, or by 1 if that is 0.
        weight = torch.where(is_imitated, tokens.weight * (totals[0] or 1.0) / (others or 1.0), nothing)
        own = replace(tokens, weight=torch.where(is_imitated, nothing, tokens.weight), totals=tuple(totals))
        return own, replace(tokens, weight=weight)


class MixedObjective(_WithImitation):
    """(1 - mu) policy loss on the policy's own rows + mu NLL on an expert's: MIX of Trinity-RFT (arXiv 2505.17826).

    Expert rows have ``is_expert`` 1. Each part is averaged over its own rows of the mini-batch: the policy's by its
    loss's aggregation, the expert's over the tokens of a response, then over responses.
    """

    def __init__(self, policy: PolicyObjective, mu: float) -> None:
        super().__init__(policy, SftObjective("seq-mean-token-mean"), "is_expert")
        self.mu, self.factors = mu, (1 - mu, mu)

    def imitated(self, batch: Batch) -> np.ndarray:
        mask = batch["response_mask"]
        return np.repeat(batch["is_expert"].values > 0, mask.lengths) & (mask.values > 0)

    def is_imitated(self, tokens: ResponseTokens) -> torch.Tensor:
        return tokens.columns["is_expert"][tokens.row] > 0


class ObservedObjective(_WithImitation):
    """Policy loss + coef times the NLL of answers of tools and environments, averaged over their tokens.

    ECHO, as in prime-rl: the policy also learns to predict its environment. Answers have ``token_turn`` 0 after the
    policy's first turn, with the marks of the chat template, which prime-rl omits. Responses without a trained token do
    not count.
    """

    def __init__(self, policy: PolicyObjective, coef: float) -> None:
        super().__init__(policy, SftObjective("token-mean", metric="loss/observations"), "token_turn")
        self.factors = (1.0, coef)

    def imitated(self, batch: Batch) -> np.ndarray:
        mask, turn = batch["response_mask"], batch["token_turn"].values
        row = np.repeat(np.arange(len(mask)), mask.lengths)
        rows = RowReducer(torch.from_numpy(row), torch.from_numpy(turn > 0))
        has_begun = rows.prefix_sums(torch.ones(len(turn))).numpy() > 0
        is_trained = RowReducer(rows.row, torch.from_numpy(mask.values > 0)).counts.numpy() > 0
        return has_begun & is_trained & (turn == 0)

    def is_imitated(self, tokens: ResponseTokens) -> torch.Tensor:
        return (tokens.columns["token_turn"] == 0) & (tokens.weight > 0)


def _ones(column: Column) -> Column:
    return Column(np.ones(len(column.values), dtype=np.float32), column.offsets)
