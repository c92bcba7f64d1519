"""Qwen3 mixtures of experts (https://arxiv.org/abs/2505.09388): attention of Qwen3, experts in all or some layers."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.backends.families.base import Family, weight_of_one_expert
from dagrl.backends.families.config_fields import (
    COMMON_RANGES,
    COUNT,
    EXPERT_RANGES,
    LAYER_NUMBERS,
    WIDTH,
    ConfigFields,
    MegatronFields,
    is_size,
)
from dagrl.backends.families.parts import MIXTURE_DEFAULTS, Attention


class Qwen3Moe(Family):
    """Mixtures of experts of Qwen3."""

    model_type = "qwen3_moe"
    expert_count = ("num_experts", "num_local_experts")
    ranges = {
        **COMMON_RANGES,
        **EXPERT_RANGES,
        "decoder_sparse_step": COUNT,
        "mlp_only_layers": LAYER_NUMBERS,
        "shared_expert_intermediate_size": WIDTH,
    }
    required = {"attention_bias": (False,), "use_sliding_window": (False,)}
    transformer_defaults = MIXTURE_DEFAULTS
    serves_dense_layers = False

    def attention(self, config: ConfigFields) -> Attention:
        return self.grouped_query_attention(config, qk_norm=True)

    def mixture_layers(self, config: ConfigFields) -> tuple[bool, ...]:
        dense, every = config.get("mlp_only_layers") or (), config.optional("decoder_sparse_step") or 1
        return tuple(
            layer not in dense and (layer + 1) % every == 0 for layer in range(config.size("num_hidden_layers"))
        )

    def transformer_fields(self, config: ConfigFields) -> MegatronFields:
        return {
            "moe_router_score_function": "softmax",
            # Softmax over all experts, renormalised over the best k, equals softmax over the best k.
            "moe_router_pre_softmax": not config.get("norm_topk_prob"),
        }

    def unsupported(self, config: ConfigFields) -> Iterator[tuple[str, str]]:
        yield from super().unsupported(config)
        if is_size(config.get("num_hidden_layers")) and not any(self.mixture_layers(config)):
            field = "decoder_sparse_step" if (config.get("decoder_sparse_step") or 1) > 1 else "mlp_only_layers"
            message = "this qwen3_moe has no layer with experts; write it as qwen3, or change decoder_sparse_step"
            yield field, message

    def warnings(self, config: ConfigFields) -> Iterator[tuple[str, str]]:
        if config.get("norm_topk_prob"):
            yield from weight_of_one_expert(config)


FAMILY = Qwen3Moe()
