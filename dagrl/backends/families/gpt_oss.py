"""gpt-oss (https://arxiv.org/abs/2508.10925): sinks, sliding windows, and experts with biases in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dagrl.backends.families.base import Family
from dagrl.backends.families.config_fields import ConfigFields, HfConfig, MegatronFields
from dagrl.backends.families.gemma2 import sliding_layers
from dagrl.backends.families.parts import MIXTURE_DEFAULTS, Attention, GatedExperts, GroupedQueryAttention, Tensors
from dagrl.backends.families.tensor_maps import MappedTensor, Parallel, Replicated


class GptOss(Family):
    """gpt-oss 20B and 120B, their weights dequantised."""

    model_type = "gpt_oss"
    bridged = True
    # A layer's experts are one published tensor.
    has_tables = False
    # Not tested with inference engines.
    reports_routed_experts = False
    expert_count = ("num_local_experts", "num_experts")
    expert_width = "intermediate_size"
    layer_kinds = ("full_attention", "sliding_attention")
    rope_kinds = ("yarn",)
    required = {"attention_bias": (True,)}
    transformer_defaults = {**MIXTURE_DEFAULTS, "apply_rope_fusion": False, "bias_activation_fusion": False}

    def attention(self, config: ConfigFields) -> Attention:
        return self.grouped_query_attention(config, SinkAttention, qkv_bias=True)

    def experts(self, config: ConfigFields) -> GatedExperts:
        return self.gated_experts(config, BiasedExperts)

    def transformer_fields(self, config: ConfigFields) -> MegatronFields:
        rope = config["rope_parameters"]
        return {
            "window_attn_skip_freq": sliding_layers(config),
            "yarn_rotary_scaling_factor": rope["factor"],
            "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
            "yarn_beta_fast": rope.get("beta_fast") or 32.0,
            "yarn_beta_slow": rope.get("beta_slow") or 1.0,
            "yarn_correction_range_round_to_int": rope.get("truncate", True),
            "yarn_mscale": rope.get("mscale"),
            "yarn_mscale_all_dim": rope.get("mscale_all_dim"),
        }

    def unsupported_rope(self, config: ConfigFields, rope: HfConfig) -> Iterator[str]:
        if rope:
            yield from super().unsupported_rope(config, rope)
        if rope.get("attention_factor") is not None:
            yield "megatron's yarn has no attention_factor; remove it"


@dataclass(frozen=True, slots=True)
class SinkAttention(GroupedQueryAttention):
    """Attention with an output bias, and a sink: a logit of each head in the softmax."""

    def tensors(self) -> Tensors:
        return (
            *GroupedQueryAttention.tensors(self),
            MappedTensor(
                "self_attention.linear_proj.bias", ("self_attn.o_proj.bias",), ((self.hidden,),), Replicated()
            ),
            MappedTensor(
                "self_attention.core_attention.softmax_offset", ("self_attn.sinks",), ((self.heads,),), Parallel(0)
            ),
        )


@dataclass(frozen=True, slots=True)
class BiasedExperts(GatedExperts):
    """Experts and a router with biases."""

    def tensors(self) -> Tensors:
        experts = f"{self.block}.experts.{{expert}}"
        up = tuple(f"{experts}.{name}.bias" for name in self.projections[:2])
        down = f"{experts}.{self.projections[2]}.bias"
        return (
            *GatedExperts.tensors(self),
            MappedTensor("mlp.router.bias", (f"{self.block}.gate.bias",), ((self.count,),), Replicated()),
            MappedTensor("mlp.experts.linear_fc1.bias{expert}", up, ((self.width,), (self.width,)), Parallel(0)),
            MappedTensor("mlp.experts.linear_fc2.bias{expert}", (down,), ((self.hidden,),), Replicated()),
        )


FAMILY = GptOss()
