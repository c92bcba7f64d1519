"""Megatron's latent attention with the norms that DeepSeek-V3 and Moonlight have.

Used by `model`, between the layer specs that Megatron makes and the model that it builds of them.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

_LATENT_NORM_EPSILON = 1e-6
"""Of the norms of latents, whatever the config says of the others: the models' published code has it so."""


class LatentAttention(MLASelfAttention):
    """Differs from megatron's in two points, each of which would give other numbers than the published models.

    The norms of latents have an epsilon of their own; and where queries have no latent (``q_lora_rank: null``) their
    projection has no norm, which megatron 0.19 puts there whenever the keys' latent has one.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        own = copy.copy(config)
        own.layernorm_epsilon = _LATENT_NORM_EPSILON
        super().__init__(own, *args, **kwargs)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        classes: dict[str, Any] = super()._resolve_qk_norm_config(submodules)
        if self.config.q_lora_rank is None:
            classes["linear_q_proj"] = submodules.linear_q_proj
        return classes


def use_latent_norms(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Let the layers with latent attention, all or none of `block`, take `LatentAttention`; the specs are changed."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        if isinstance(attention, ModuleSpec) and attention.module is MLASelfAttention:
            attention.module = LatentAttention
    return block
