"""Qwen3-Next (https://arxiv.org/abs/2412.06464 for its gated delta nets): linear attention in three of four layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dagrl.backends.families.config_fields import COUNT, HEADS, ConfigFields, MegatronFields
from dagrl.backends.families.parts import Attention, GroupedQueryAttention, LinearAttention, Tensors
from dagrl.backends.families.qwen2_moe import Qwen2Moe
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.families.tensor_maps import MappedTensor, Parallel

_LINEAR = "linear_attention"


class Qwen3Next(Qwen2Moe):
    """Qwen3-Next."""

    model_type = "qwen3_next"
    bridged = True
    # Megatron fuses the projections of linear attention in an order that no table here has.
    has_tables = False
    # Not tried with inference engines.
    reports_routed_experts = False
    zero_centred_norms = True
    rotates_parts = True
    layer_kinds = ("full_attention", _LINEAR)
    rope_kinds = ("default",)
    required = {"attention_bias": (False,), "mlp_only_layers": ([],), "decoder_sparse_step": (1,)}
    sizes = (
        "shared_expert_intermediate_size",
        *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    )
    ranges = {
        **Qwen2Moe.ranges,
        **dict.fromkeys(
            ("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"), HEADS
        ),
        "linear_conv_kernel_dim": COUNT,
    }

    def attention(self, config: ConfigFields) -> Attention:
        return self.grouped_query_attention(config, GatedAttention, qk_norm=True)

    def shape(self, config: ConfigFields) -> ModelShape:
        linear = LinearAttention(
            hidden=config.size("hidden_size"),
            key_heads=config.size("linear_num_key_heads"),
            value_heads=config.size("linear_num_value_heads"),
            key_dim=config.size("linear_key_head_dim"),
            value_dim=config.size("linear_value_head_dim"),
            kernel=config.size("linear_conv_kernel_dim"),
        )
        return replace(super().shape(config), linear=linear, linear_layers=_linear_layers(config))

    def transformer_fields(self, config: ConfigFields) -> MegatronFields:
        return {"linear_attention_freq": [int(linear) for linear in _linear_layers(config)]}

    def unsupported(self, config: ConfigFields) -> Iterator[tuple[str, str]]:
        yield from super().unsupported(config)
        if config.get("norm_topk_prob") is False:
            yield "norm_topk_prob", "megatron-bridge normalises the weights of chosen experts; set it to true"


def _linear_layers(config: ConfigFields) -> tuple[bool, ...]:
    layers, kinds = config.size("num_hidden_layers"), config.get("layer_types")
    if kinds:
        return tuple(kind == _LINEAR for kind in kinds)
    every = config.get("full_attention_interval") or 4
    return tuple((layer + 1) % every != 0 for layer in range(layers))


@dataclass(frozen=True, slots=True)
class GatedAttention(GroupedQueryAttention):
    """Attention whose outputs are multiplied with the sigmoid of a gate, of the same width as the queries."""

    def tensors(self) -> Tensors:
        width = self.heads * self.head_dim
        gate = MappedTensor(
            "self_attention.linear_qkv.gate", ("self_attn.q_proj.gate",), ((width, self.hidden),), Parallel(0)
        )
        return (*GroupedQueryAttention.tensors(self), gate)


FAMILY = Qwen3Next()
