"""Floating-point operations of a model, from its shape and the lengths of rows.

The counts are the necessary matrix products of a model, two operations for each multiply-add: the model FLOPs of "PaLM"
(arXiv 2204.02311, appendix B), layer by layer as in the appendix of "Efficient Large-Scale Language Model Training on
GPU Clusters Using Megatron-LM" (arXiv 2104.04473). Three things differ, because those formulas count work that dagrl
avoids:

- attention is causal: half of the square of a row's length, not all of it;
- the output layer counts for the positions that predict response tokens;
- in a mixture, the experts that a token is sent to count, and the shared ones.

Recomputation, padding, the states of linear attention, embedding look-ups, norms, rotary embeddings, softmax and
activations do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagrl.backends.families.shape import ModelShape, attention_weights, mlp_weights

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Operations of a model's passes."""

    per_token: int
    """Operations of all layers' matrices on one token."""
    per_pair: int
    """Operations of all layers' attention on one query and one key: score and weighted value."""
    per_prediction: int
    """Operations of the head on one position."""

    def forward(self, lengths: np.ndarray, predictions: int) -> int:
        """Count a forward pass over rows of `lengths` tokens (int64 [rows]) and `predictions` positions of the head."""
        tokens = int(lengths.sum())
        squares = sum(length * length for length in lengths.tolist())
        return self.per_token * tokens + self.per_pair * squares // 2 + self.per_prediction * predictions

    def train(self, lengths: np.ndarray, predictions: int, *, frozen: bool = False) -> int:
        """Count a forward and a backward pass, which has two products for each, or one with `frozen` matrices."""
        if not frozen:
            return 3 * self.forward(lengths, predictions)
        return 2 * self.forward(lengths, predictions) + replace(self, per_token=0, per_prediction=0).forward(lengths, 0)


def model_flops(shape: ModelShape, *, outputs: int | None = None) -> ModelFlops:
    """Return the operations of a model whose head has `outputs` for one position, by default the vocabulary."""
    mixtures = sum(shape.mixture_layers) if shape.experts else 0
    linear = sum(shape.linear_layers)
    weights = (shape.layers - linear) * attention_weights(shape.attention)
    weights += (shape.layers - mixtures) * mlp_weights(shape.mlp)
    if shape.linear is not None:
        weights += linear * attention_weights(shape.linear)
    if shape.experts:
        weights += mixtures * mlp_weights(shape.experts)
    head = shape.hidden * (shape.vocabulary if outputs is None else outputs)
    return ModelFlops(
        per_token=2 * weights,
        per_pair=2 * (shape.layers - linear) * shape.attention.pair_products,
        per_prediction=2 * head,
    )
