"""Something to train heads on. Import as ``from squared_error import SquaredError``, as `gradients` is."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dagrl.backends.base import ValueTokens
    from dagrl.data.batch import Batch, Column


@dataclass(frozen=True)
class SquaredError:
    """Of what a head says: values against the advantage column, or scores against the reward column."""

    head: str
    needs_entropy: bool = False
    candidates: str | None = None
    whole_divergence: None = None
    temperature: float = 1.0

    @property
    def columns(self) -> tuple[str, ...]:
        """The targets."""
        return ("advantage",) if self.head == "value" else ("reward",)

    def token_weights(self, batch: "Batch") -> "tuple[Column, tuple[float, ...]]":
        """All tokens of the mask alike, or all rows."""
        from dagrl.data.batch import Column

        if self.head == "value":
            return batch["response_mask"], (float(batch["response_mask"].values.sum()),)
        return Column(np.ones(len(batch), np.float32)), (float(len(batch)),)

    def token_loss(self) -> None:
        """There are no logits."""

    def __call__(self, tokens: "ValueTokens") -> Any:
        """The micro-batch's share, and the mean."""
        from dagrl.data.tally import tally_mean

        error = (tokens.value - tokens.columns[self.columns[0]]).square()
        return (tokens.weight * error).sum(), {"loss": tally_mean(error, tokens.weight)}
