"""Tables of dense models, and the parts of a layer that other tables share with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagrl.backends.megatron.engine.families.table import Family, MappedTensor, Maps
from dagrl.backends.megatron.engine.tensor_maps import GateUp, GroupedQkv, Parallel, Replicated

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def head_dim(config: PretrainedConfig) -> int:
    """The config's own, or a head's share of the hidden size."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def attention(config: PretrainedConfig) -> Maps:
    """Grouped-query attention and the norm before it."""
    qkv = GroupedQkv(config.num_key_value_heads, head_dim(config))
    projections = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
    return (
        MappedTensor("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), Replicated()),
        MappedTensor("self_attention.linear_qkv.weight", projections, qkv),
        MappedTensor("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), Parallel(dim=1)),
    )


def _qkv_bias(config: PretrainedConfig) -> Maps:
    biases = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
    qkv = GroupedQkv(config.num_key_value_heads, head_dim(config))
    return (MappedTensor("self_attention.linear_qkv.bias", biases, qkv),)


QK_NORM: Maps = (
    MappedTensor("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), Replicated()),
    MappedTensor("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), Replicated()),
)

GATED_MLP: Maps = (
    MappedTensor("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",), Replicated()),
    MappedTensor("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GateUp()),
    MappedTensor("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), Parallel(dim=1)),
)

DENSE: dict[str, Family] = {
    "llama": Family(
        fields=lambda config: {},
        layer=lambda config, layer: (*attention(config), *GATED_MLP),
    ),
    "qwen2": Family(
        fields=lambda config: {"add_qkv_bias": True},
        layer=lambda config, layer: (*attention(config), *_qkv_bias(config), *GATED_MLP),
    ),
    "qwen3": Family(
        fields=lambda config: {"qk_layernorm": True},
        layer=lambda config, layer: (*attention(config), *QK_NORM, *GATED_MLP),
    ),
}
