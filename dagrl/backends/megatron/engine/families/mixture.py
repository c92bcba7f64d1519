"""Tables of mixtures of experts with grouped-query attention, and what all mixtures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dagrl.backends.megatron.engine.families.dense import GATED_MLP, QK_NORM, attention
from dagrl.backends.megatron.engine.families.table import Family, MappedTensor, Maps
from dagrl.backends.megatron.engine.tensor_maps import GateUp, Parallel, Replicated

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MIXTURE_DEFAULTS: dict[str, Any] = {
    "moe_grouped_gemm": True,
    # The only dispatcher besides `flex` for packs of uneven length.
    "moe_token_dispatcher_type": "alltoall",
    # Rewards alone move the weights, unless the user asks for a balance of experts.
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    # The choice of experts is a matter of the last bits.
    "moe_router_dtype": "fp32",
}


def experts(block: str, gate: str, up: str, down: str) -> Maps:
    """Router and routed experts; `block` and the three projections are as the family's checkpoints name them."""
    expert = f"{block}.experts.{{expert}}"
    return (
        MappedTensor("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Replicated()),
        MappedTensor("mlp.router.weight", (f"{block}.gate.weight",), Replicated()),
        MappedTensor(
            "mlp.experts.linear_fc1.weight{expert}", (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"), GateUp()
        ),
        MappedTensor("mlp.experts.linear_fc2.weight{expert}", (f"{expert}.{down}.weight",), Parallel(dim=1)),
    )


def layer_pattern(has_experts: Sequence[bool]) -> int | list[int]:
    """Megatron's ``moe_layer_freq``: which layers are mixtures. A list says that layers differ, so all alike are 1."""
    return 1 if all(has_experts) else [int(mixture) for mixture in has_experts]


GATED_EXPERTS = experts("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_EXPERTS = experts("block_sparse_moe", "w1", "w3", "w2")


def _qwen3_is_mixture(config: PretrainedConfig, layer: int) -> bool:
    return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0


def _qwen3_fields(config: PretrainedConfig) -> dict[str, Any]:
    pattern = [_qwen3_is_mixture(config, layer) for layer in range(config.num_hidden_layers)]
    return {
        "qk_layernorm": True,
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": layer_pattern(pattern),
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_score_function": "softmax",
        # Softmax over all and then over the best k anew is softmax over the best k.
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }


def _mixtral_fields(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "num_moe_experts": config.num_local_experts,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_layer_freq": 1,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
    }


MIXTURE: dict[str, Family] = {
    "qwen3_moe": Family(
        fields=_qwen3_fields,
        layer=lambda config, layer: (
            *attention(config),
            *QK_NORM,
            *(GATED_EXPERTS if _qwen3_is_mixture(config, layer) else GATED_MLP),
        ),
        experts=lambda config: config.num_experts,
        defaults=MIXTURE_DEFAULTS,
    ),
    "mixtral": Family(
        fields=_mixtral_fields,
        layer=lambda config, layer: (*attention(config), *_MIXTRAL_EXPERTS),
        experts=lambda config: config.num_local_experts,
        defaults=MIXTURE_DEFAULTS,
    ),
}
