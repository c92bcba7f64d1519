"""The table of DeepSeek-V3 (https://arxiv.org/abs/2412.19437) and of Moonlight, which is built alike.

Latent attention, shared experts beside routed ones, and a router by sigmoid with a bias that only chooses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dagrl.backends.megatron.engine.families.dense import GATED_MLP
from dagrl.backends.megatron.engine.families.mixture import GATED_EXPERTS, MIXTURE_DEFAULTS, layer_pattern
from dagrl.backends.megatron.engine.families.table import Family, MappedTensor, Maps
from dagrl.backends.megatron.engine.tensor_maps import GateUp, Parallel, Replicated

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _attention(config: PretrainedConfig) -> Maps:
    down, up = "self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight"
    keys = MappedTensor("self_attention.linear_kv_down_proj.weight", (down,), Replicated())
    return (
        MappedTensor("input_layernorm.weight", ("input_layernorm.weight",), Replicated()),
        *((*_QUERY_DIRECT, keys) if config.q_lora_rank is None else _latent_query(keys)),
        MappedTensor(
            "self_attention.linear_kv_up_proj.layer_norm_weight", ("self_attn.kv_a_layernorm.weight",), Replicated()
        ),
        MappedTensor("self_attention.linear_kv_up_proj.weight", (up,), Parallel(dim=0)),
        MappedTensor("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), Parallel(dim=1)),
    )


_QUERY_DIRECT: Maps = (
    MappedTensor("self_attention.linear_q_proj.weight", ("self_attn.q_proj.weight",), Parallel(dim=0)),
)


def _latent_query(keys: MappedTensor) -> Maps:
    norm = "self_attention.linear_q_up_proj.layer_norm_weight"
    return (
        MappedTensor("self_attention.linear_q_down_proj.weight", ("self_attn.q_a_proj.weight",), Replicated()),
        replace(keys, with_the_one_before=True),
        MappedTensor(norm, ("self_attn.q_a_layernorm.weight",), Replicated()),
        MappedTensor("self_attention.linear_q_up_proj.weight", ("self_attn.q_b_proj.weight",), Parallel(dim=0)),
    )


_SHARED = "mlp.shared_experts"
_EXPERTS: Maps = (
    *GATED_EXPERTS,
    MappedTensor("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",), Replicated(), buffer=True),
    MappedTensor(
        f"{_SHARED}.linear_fc1.weight", (f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight"), GateUp()
    ),
    MappedTensor(f"{_SHARED}.linear_fc2.weight", (f"{_SHARED}.down_proj.weight",), Parallel(dim=1)),
)


def _fields(config: PretrainedConfig) -> dict[str, Any]:
    pattern = [layer >= config.first_k_dense_replace for layer in range(config.num_hidden_layers)]
    return {
        "multi_latent_attention": True,
        # The norms of the latents, which belong to any model with latents.
        "qk_layernorm": True,
        "num_query_groups": config.num_attention_heads,
        "kv_channels": config.v_head_dim,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        # It would give the parameters other names.
        "mla_down_proj_fusion": False,
        "num_moe_experts": config.n_routed_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": layer_pattern(pattern),
        "moe_shared_expert_intermediate_size": config.n_shared_experts * config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        **_group_limit(config),
        **_rope(config),
    }


def _group_limit(config: PretrainedConfig) -> dict[str, int]:
    """Experts come from the best `topk_group` of `n_group` groups; no limit where those are all."""
    groups, chosen = config.n_group or 1, config.topk_group or 1
    return {} if chosen >= groups else {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    """The rotation is part of latent attention's config, not an argument of the model."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        return {"rope_type": "rope", "rotary_base": rope["rope_theta"]}
    # Hugging Face ignores `mscale` where `mscale_all_dim` is missing or 0; Megatron divides by a scale of 1 then.
    each, both = rope.get("mscale"), rope.get("mscale_all_dim")
    return {
        "rope_type": "yarn",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32.0,
        "beta_slow": rope.get("beta_slow") or 1.0,
        "mscale": each if each and both else 1.0,
        "mscale_all_dim": both or 0.0,
    }


LATENT: dict[str, Family] = {
    "deepseek_v3": Family(
        fields=_fields,
        layer=lambda config, layer: (
            *_attention(config),
            *(_EXPERTS if layer >= config.first_k_dense_replace else GATED_MLP),
        ),
        rope=lambda config: {},
        experts=lambda config: config.n_routed_experts,
        defaults={
            **MIXTURE_DEFAULTS,
            # A bias that moves on its own would change the policy without a reward.
            "moe_router_bias_update_rate": 0.0,
            # Megatron's fused kernels know yarn only.
            "apply_rope_fusion": False,
        },
        latent=True,
    ),
}
