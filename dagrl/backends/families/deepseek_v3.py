"""DeepSeek-V3 (https://arxiv.org/abs/2412.19437), and Moonlight, which has the same architecture.

Latent attention, shared experts beside routed ones, and a sigmoid router with a bias that only affects the choice of
experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from dagrl.backends.families.base import Family, mixture_after_dense_layers, odd_width
from dagrl.backends.families.config_fields import (
    ABOVE_ZERO,
    COMMON_RANGES,
    COUNT,
    EXPERT_RANGES,
    HEADS,
    LAYERS,
    RANK,
    ConfigFields,
    HfConfig,
    MegatronFields,
    is_size,
    whole,
)
from dagrl.backends.families.parts import MIXTURE_DEFAULTS, GatedExperts, LatentAttention
from dagrl.config.errors import shown

_NEEDED_COUNT = whole(1, 2**16, nullable=False)


class DeepseekV3(Family):
    """DeepSeek-V3, R1 and Moonlight."""

    model_type = "deepseek_v3"
    sizes: ClassVar[tuple[str, ...]] = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    expert_count = ("n_routed_experts", "num_local_experts")
    latent = True
    ranges = {
        **COMMON_RANGES,
        **EXPERT_RANGES,
        **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), HEADS),
        "v_head_dim": whole(1, 2**14, nullable=False),
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), RANK),
        "n_shared_experts": COUNT,
        **dict.fromkeys(("n_group", "topk_group"), _NEEDED_COUNT),
        "first_k_dense_replace": LAYERS,
        "routed_scaling_factor": ABOVE_ZERO,
    }
    required = {
        "attention_bias": (False,),
        "rope_interleave": (True,),
        # These three are in config.json only.
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    }
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "yarn")
    transformer_defaults = {
        **MIXTURE_DEFAULTS,
        # A bias that moves without gradients would change the policy without a reward.
        "moe_router_bias_update_rate": 0.0,
        # Megatron's fused kernels know yarn only.
        "apply_rope_fusion": False,
    }

    def attention(self, config: ConfigFields) -> LatentAttention:
        return self.latent_attention(config)

    def experts(self, config: ConfigFields) -> GatedExperts:
        shared_width = (config.optional("n_shared_experts") or 0) * config.size(self.expert_width)
        return self.gated_experts(config, shared_width=shared_width, biased=True)

    def mixture_layers(self, config: ConfigFields) -> tuple[bool, ...]:
        return mixture_after_dense_layers(config)

    def transformer_fields(self, config: ConfigFields) -> MegatronFields:
        groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
        return {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
            # Experts come from the best `topk_group` groups; without a limit if these are all groups.
            **({"moe_router_num_groups": groups, "moe_router_group_topk": chosen} if chosen < groups else {}),
            **_rope_fields(config["rope_parameters"]),
        }

    def rope_arguments(self, config: ConfigFields) -> MegatronFields:
        """Return nothing: the rotary embedding is in `transformer_fields`."""
        return {}

    def conflicts_of_heads(self, config: HfConfig) -> Iterator[str]:
        """Yield an odd width of the rotated part: the sizes of heads are independent of each other."""
        yield from odd_width(config, "qk_rope_head_dim")

    def conflicts(self, config: HfConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        chosen, groups, taken = (config.get(name) for name in ("num_experts_per_tok", "n_group", "topk_group"))
        name = next((name for name in self.expert_count if is_size(config.get(name))), None)
        if not name or not is_size(groups) or (is_size(chosen) and chosen > config[name]):
            return
        size = config[name] // groups
        if config[name] % groups:
            yield f"n_group {groups} does not divide {name} {config[name]}; choose a divisor"
        elif size < 2:
            yield f"n_group {groups} leaves {size} expert a group, which is ranked by its best two; lower n_group"
        elif is_size(taken) and taken > groups:
            yield f"topk_group {taken} is more than n_group {groups}; lower it"
        elif is_size(taken) and is_size(chosen) and chosen > taken * size:
            yield (
                f"num_experts_per_tok {chosen} is more than topk_group {taken} groups of {size} experts have; lower it"
            )

    def unsupported(self, config: ConfigFields) -> Iterator[tuple[str, str]]:
        yield from super().unsupported(config)
        groups, taken, chosen = (config.get(name) or 1 for name in ("n_group", "topk_group", "num_experts_per_tok"))
        if taken < groups and chosen // taken != 2:
            yield (
                "topk_group",
                f"megatron ranks groups of experts by the sum of their best {chosen // taken} experts "
                "(num_experts_per_tok / topk_group), and this model by their best 2; it cannot be trained exactly",
            )
        normalised = bool(config.get("norm_topk_prob"))
        if normalised != (chosen > 1):
            yield (
                "norm_topk_prob",
                "megatron normalises the weights of chosen experts if there are several, and leaves that of a single "
                f"one; this model has norm_topk_prob {shown(normalised)} with num_experts_per_tok {chosen}, and cannot "
                "be trained exactly",
            )
        first, layers = config.get("first_k_dense_replace") or 0, config.get("num_hidden_layers")
        if is_size(layers) and first >= layers:
            yield (
                "first_k_dense_replace",
                f"this deepseek_v3 has no layer with experts: {first} of {layers} layers are dense; lower it",
            )

    def unsupported_rope(self, config: ConfigFields, rope: HfConfig) -> Iterator[str]:
        yield from super().unsupported_rope(config, rope)
        if rope.get("rope_type", rope.get("type")) == "yarn":
            if rope.get("attention_factor") is not None or rope.get("truncate", True) is not True:
                yield "megatron's yarn has neither attention_factor nor truncate: false; remove them"
            elif rope.get("mscale_all_dim") and not rope.get("mscale"):
                yield "megatron's yarn reads mscale_all_dim together with mscale only; add mscale"


def _rope_fields(rope: HfConfig) -> MegatronFields:
    if rope.get("rope_type", "default") == "default":
        return {"rope_type": "rope", "rotary_base": rope["rope_theta"]}
    # Hugging Face ignores `mscale` where `mscale_all_dim` is missing or 0; Megatron divides by a scale of 1 then.
    mscale, both = rope.get("mscale"), rope.get("mscale_all_dim")
    return {
        "rope_type": "yarn",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32.0,
        "beta_slow": rope.get("beta_slow") or 1.0,
        "mscale": mscale if mscale and both else 1.0,
        "mscale_all_dim": both or 0.0,
    }


FAMILY = DeepseekV3()
