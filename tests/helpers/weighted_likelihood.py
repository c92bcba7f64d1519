"""An objective for tests of engines.

Import as ``from weighted_likelihood import WeightedLikelihood``: pytest's `pythonpath` holds this folder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagrl.backends.base import ResponseTokens
    from dagrl.data.batch import Batch, Column


@dataclass(frozen=True)
class WeightedLikelihood:
    """An objective that takes everything an engine offers: both shapes of columns, entropy, masked and empty rows."""

    needs_entropy: bool = True
    candidates: str | None = None
    whole_divergence: None = None
    entropy_coef: float = 0.3
    temperature: float = 0.8
    columns: tuple[str, ...] = ("advantage", "reward")
    is_sum_over_tokens: bool = True
    """False hides from the engine that it is one."""

    def token_weights(self, batch: "Batch") -> "tuple[Column, tuple[float, ...]]":
        return batch["response_mask"], (float(batch["response_mask"].values.sum()),)

    def _loss(self, tokens: "ResponseTokens") -> Any:
        loss = -(tokens.columns["advantage"] + tokens.columns["reward"][tokens.row]) * tokens.logprob
        return loss if tokens.entropy is None else loss - self.entropy_coef * tokens.entropy

    def token_loss(self) -> "Callable[[ResponseTokens], Any] | None":
        return (lambda tokens: (tokens.weight * self._loss(tokens)).sum()) if self.is_sum_over_tokens else None

    def __call__(self, tokens: "ResponseTokens") -> Any:
        import torch

        from dagrl.data.tally import tally, tally_mean

        loss = self._loss(tokens)
        everything = torch.ones_like(tokens.weight, dtype=torch.bool)
        # Weights add up to 1 over a mini-batch.
        metrics = {"loss": tally_mean(loss, tokens.weight)} | tally({"nll": -tokens.logprob}, everything)
        return (tokens.weight * loss).sum(), metrics
