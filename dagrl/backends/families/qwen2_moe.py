"""Qwen2 mixtures of experts (https://arxiv.org/abs/2407.10671): a shared expert with a gate beside the routed ones."""

from __future__ import annotations

from typing import ClassVar

from dagrl.backends.families.config_fields import ConfigFields
from dagrl.backends.families.parts import Attention, GatedExperts
from dagrl.backends.families.qwen3_moe import Qwen3Moe


class Qwen2Moe(Qwen3Moe):
    """Qwen1.5-MoE and Qwen2 mixtures; layers with experts follow the same fields as in Qwen3."""

    model_type = "qwen2_moe"
    sizes: ClassVar[tuple[str, ...]] = ("shared_expert_intermediate_size",)
    required = {"use_sliding_window": (False,)}

    def attention(self, config: ConfigFields) -> Attention:
        return self.grouped_query_attention(config, qkv_bias=config.get("qkv_bias") is not False)

    def experts(self, config: ConfigFields) -> GatedExperts:
        width = config.size("shared_expert_intermediate_size")
        return self.gated_experts(config, shared_width=width, shared_block="shared_expert", shared_gate=True)


FAMILY = Qwen2Moe()
