"""Qwen3.5 and Qwen3.6, the language models with experts in each layer."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.backends.families.base import weight_of_one_expert
from dagrl.backends.families.config_fields import ConfigFields, HfConfig, MegatronFields
from dagrl.backends.families.gated_delta import LINEAR_RANGES, LINEAR_SIZES, GatedDeltaFamily
from dagrl.backends.families.parts import GatedMlp
from dagrl.backends.families.qwen2_moe import Qwen2Moe


class Qwen35MoeText(GatedDeltaFamily, Qwen2Moe):
    """Mixtures of experts of Qwen3.5."""

    model_type = "qwen3_5_moe_text"
    bridged = True
    # A published tensor holds all experts of a layer.
    has_tables = False
    # Not tested with inference engines.
    reports_routed_experts = False
    sizes = (*Qwen2Moe.sizes, *LINEAR_SIZES)
    ranges = {**Qwen2Moe.ranges, **LINEAR_RANGES}

    def mlp(self, config: ConfigFields) -> GatedMlp:
        # No layer has a dense MLP, and the config has no separate width for one.
        return GatedMlp(config.size("hidden_size"), config.size(self.expert_width))

    def transformer_fields(self, config: ConfigFields) -> MegatronFields:
        # The weights of chosen experts are always normalised.
        return {**super().transformer_fields(config), "moe_router_pre_softmax": False}

    def sizes_left_out(self, config: HfConfig) -> list[str]:
        return [name for name in super().sizes_left_out(config) if name != "intermediate_size"]

    def warnings(self, config: ConfigFields) -> Iterator[tuple[str, str]]:
        yield from weight_of_one_expert(config)


FAMILY = Qwen35MoeText()
