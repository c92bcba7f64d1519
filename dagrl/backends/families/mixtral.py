"""Mixtral (https://arxiv.org/abs/2401.04088): Mistral's attention, and experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.backends.families.base import Family, weight_of_one_expert
from dagrl.backends.families.config_fields import ConfigFields, MegatronFields
from dagrl.backends.families.parts import MIXTURE_DEFAULTS, GatedExperts


class Mixtral(Family):
    """Mixtral 8x7B and 8x22B, and models of the same architecture."""

    model_type = "mixtral"
    expert_count = ("num_local_experts", "num_experts")
    expert_width = "intermediate_size"
    required = {"sliding_window": (None,), "router_jitter_noise": (0.0,)}
    transformer_defaults = MIXTURE_DEFAULTS
    # Inference engines lack the numbers of its layers.
    reports_routed_experts = False

    def experts(self, config: ConfigFields) -> GatedExperts:
        return self.gated_experts(config, block="block_sparse_moe", projections=("w1", "w3", "w2"))

    def transformer_fields(self, config: ConfigFields) -> MegatronFields:
        return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False}

    def warnings(self, config: ConfigFields) -> Iterator[tuple[str, str]]:
        yield from weight_of_one_expert(config)


FAMILY = Mixtral()
