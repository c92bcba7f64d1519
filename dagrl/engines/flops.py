"""Floating-point operations of a model, from its Hugging Face config and the lengths of rows. Pure arithmetic.

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
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DENSE = ("llama", "qwen2", "qwen3")
_MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3")
_GATED_MLP_MATRICES = 3
"""Gate, up and down: the MLP of all these families."""


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


def model_flops(config: PretrainedConfig, *, outputs: int | None = None) -> ModelFlops:
    """The costs of a model. ValueError for a family whose layers are not known here.

    `outputs` of the head for one position. Default: the vocabulary.
    """
    if config.model_type not in _DENSE + _MIXTURES:
        raise ValueError(f"no count of operations for model type {config.model_type!r}")
    attention, pair = _latent_attention(config) if config.model_type == "deepseek_v3" else _grouped_attention(config)
    layers = config.num_hidden_layers
    weights = layers * attention + sum(_mlp(config, layer) for layer in range(layers))
    head = config.hidden_size * (config.vocab_size if outputs is None else outputs)
    return ModelFlops(per_token=2 * weights, per_pair=2 * layers * pair, per_prediction=2 * head)


def _grouped_attention(config: PretrainedConfig) -> tuple[int, int]:
    """Weights of one layer's projections, and multiply-adds for one query and one key."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    projections = config.hidden_size * width * (2 * heads + 2 * config.num_key_value_heads)
    return projections, 2 * heads * width


def _latent_attention(config: PretrainedConfig) -> tuple[int, int]:
    """The same for multi-head latent attention ("DeepSeek-V2", arXiv 2405.04434, section 2.1), keys and values laid
    out for each head, as training computes them.
    """
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    queries = (hidden + heads * query) * config.q_lora_rank if config.q_lora_rank else hidden * heads * query
    compressed = hidden * (rank + config.qk_rope_head_dim)
    expanded = rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    output = heads * config.v_head_dim * hidden
    return queries + compressed + expanded + output, heads * (query + config.v_head_dim)


def _mlp(config: PretrainedConfig, layer: int) -> int:
    """Weights that one token meets in a layer's MLP: of a mixture, the router and the experts it is sent to."""
    hidden = config.hidden_size
    if not _is_mixture(config, layer):
        return _GATED_MLP_MATRICES * hidden * config.intermediate_size
    if config.model_type == "mixtral":
        experts, shared, width = config.num_local_experts, 0, config.intermediate_size
    elif config.model_type == "qwen3_moe":
        experts, shared, width = config.num_experts, 0, config.moe_intermediate_size
    else:
        experts, shared, width = config.n_routed_experts, config.n_shared_experts or 0, config.moe_intermediate_size
    return hidden * experts + (config.num_experts_per_tok + shared) * _GATED_MLP_MATRICES * hidden * width


def _is_mixture(config: PretrainedConfig, layer: int) -> bool:
    if config.model_type == "mixtral":
        return True
    if config.model_type == "qwen3_moe":
        return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    return config.model_type == "deepseek_v3" and layer >= config.first_k_dense_replace
