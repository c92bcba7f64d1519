"""An objective for tests of engines.

Import as ``from weighted_likelihood import WeightedLikelihood``: pytest's `pythonpath` holds this folder.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagrl.backends.base import ResponseTokens
    from dagrl.data.batch import Batch, Column


@dataclass(frozen=True)
class WeightedLikelihood:
    """An objective that takes everything an engine offers: both shapes of columns, entropy, masked and empty rows."""

    needs_entropy: bool = True
    entropy_coef: float = 0.3
    temperature: float = 0.8
    columns: tuple[str, ...] = ("advantage", "reward")

    def token_weights(self, batch: "Batch") -> "tuple[Column, tuple[float, ...]]":
        return batch["response_mask"], (float(batch["response_mask"].values.sum()),)

    def __call__(self, tokens: "ResponseTokens") -> Any:
        import torch

        from dagrl.data.tally import tally, tally_mean

        loss = -(tokens.columns["advantage"] + tokens.columns["reward"][tokens.row]) * tokens.logprob
        if tokens.entropy is not None:
            loss = loss - self.entropy_coef * tokens.entropy
        everything = torch.ones_like(tokens.weight, dtype=torch.bool)
        # Weights add up to 1 over a mini-batch.
        metrics = {"loss": tally_mean(loss, tokens.weight)} | tally({"nll": -tokens.logprob}, everything)
        return (tokens.weight * loss).sum(), metrics
