"""Latent attention as published models compute it."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

_LATENT_NORM_EPSILON = 1e-6
"""Epsilon of the latent norms in the models' published code, whatever the config's other epsilon."""


class DeepseekLatentAttention(MLASelfAttention):
    """Differs from Megatron's class in two points, to give the same numbers as the published models.

    Latent norms have a separate epsilon; and if queries have no latent (``q_lora_rank: null``), their projection has no
    norm, which Megatron 0.19 adds if the keys' latent has one.
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
    """Replace latent attention in all layers of `block` by `DeepseekLatentAttention`; changes the specs in place."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        if isinstance(attention, ModuleSpec) and attention.module is MLASelfAttention:
            attention.module = DeepseekLatentAttention
    return block
