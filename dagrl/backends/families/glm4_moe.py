"""GLM-4.5 (https://arxiv.org/abs/2508.06471): grouped queries, and the mixture of DeepSeek-V3."""

from __future__ import annotations

from dagrl.backends.families.config_fields import ConfigFields, MegatronFields
from dagrl.backends.families.deepseek_v3 import DeepseekV3
from dagrl.backends.families.parts import Attention


class Glm4Moe(DeepseekV3):
    """GLM-4.5, GLM-4.5-Air and GLM-4.6."""

    model_type = "glm4_moe"
    bridged = True
    sizes = ()
    latent = False
    required = {}
    rope_kinds = ("default",)
    rotates_parts = True

    def attention(self, config: ConfigFields) -> Attention:  # type: ignore[override]
        biased, normed = bool(config.get("attention_bias")), bool(config.get("use_qk_norm"))
        return self.grouped_query_attention(config, qkv_bias=biased, qk_norm=normed)

    def transformer_fields(self, config: ConfigFields) -> MegatronFields:
        groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
        limited = chosen < groups
        return {
            "moe_router_num_groups": groups if limited else None,
            "moe_router_group_topk": chosen if limited else None,
            "moe_shared_expert_intermediate_size": self.experts(config).shared_width or None,
        }


FAMILY = Glm4Moe()
