"""Floating-point operations of a model, from its shape and the lengths of rows. Pure arithmetic.

Counted are the matrix products that a model cannot do without, two operations for each multiply-add: the model FLOPs of
"PaLM" (arXiv 2204.02311, appendix B), layer by layer as in the appendix of "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM" (arXiv 2104.04473). Three things differ, for there they count work that
nobody does here:

- attention is causal: half of the square of a row's length, not all of it;
- the output layer is counted for the positions that reach it: those that predict response tokens;
- of a mixture's experts those count that a token is sent to, and the shared ones.

Not counted: recomputation, padding, embedding look-ups, norms, rotary embeddings, softmax and activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dagrl.models.shape import GATED_MLP_MATRICES, ModelShape


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """What a forward pass of a model costs."""

    per_token: int
    """Operations of all layers' matrices on one token."""
    per_pair: int
    """Operations of all layers' attention on one query and one key: score and weighted value."""
    per_prediction: int
    """Operations of the head on one position."""

    def forward(self, lengths: np.ndarray, predictions: int) -> int:
        """Of a forward pass over rows of these lengths (tokens, int64 [rows]), `predictions` positions of which reach
        the head.
        """
        tokens = int(lengths.sum())
        squares = sum(length * length for length in lengths.tolist())
        return self.per_token * tokens + self.per_pair * squares // 2 + self.per_prediction * predictions

    def train(self, lengths: np.ndarray, predictions: int) -> int:
        """Of a forward and a backward pass: each product has two in the backward pass, for both of its factors."""
        return 3 * self.forward(lengths, predictions)


def model_flops(shape: ModelShape, *, outputs: int | None = None) -> ModelFlops:
    """The costs of a model. `outputs` of the head for one position. Default: the vocabulary."""
    layers = [attention_weights(shape) + mlp_weights(shape, layer) for layer in shape.positions]
    head = shape.hidden * (shape.vocabulary if outputs is None else outputs)
    return ModelFlops(
        per_token=2 * sum(layers), per_pair=2 * shape.layers * pair_products(shape), per_prediction=2 * head
    )


def attention_weights(shape: ModelShape) -> int:
    """Weights of one layer's projections, each of which is multiplied once with every token."""
    hidden, heads = shape.hidden, shape.heads
    if shape.latent is None:
        return hidden * shape.head_dim * (2 * heads + 2 * shape.key_value_heads)
    # "DeepSeek-V2", arXiv 2405.04434, section 2.1, keys and values laid out for each head, as training computes them.
    sizes = shape.latent
    query = sizes.query_dim
    queries = (hidden + heads * query) * sizes.query_rank if sizes.query_rank else hidden * heads * query
    compressed = hidden * (sizes.key_rank + sizes.rotary_dim)
    expanded = sizes.key_rank * heads * (sizes.plain_dim + sizes.value_dim)
    return queries + compressed + expanded + heads * sizes.value_dim * hidden


def pair_products(shape: ModelShape) -> int:
    """Multiply-adds of one layer's attention on one query and one key: the score, and the weighted value."""
    query = shape.latent.query_dim if shape.latent else shape.head_dim
    return shape.heads * (query + shape.head_dim)


def mlp_weights(shape: ModelShape, layer: int) -> int:
    """Weights that one token meets in a layer's MLP: of a mixture, the router and the experts it is sent to."""
    experts = shape.experts
    if experts is None or not shape.is_mixture(layer):
        return GATED_MLP_MATRICES * shape.hidden * shape.dense_width
    met = experts.chosen * experts.width + experts.shared_width
    return shape.hidden * experts.count + GATED_MLP_MATRICES * shape.hidden * met
