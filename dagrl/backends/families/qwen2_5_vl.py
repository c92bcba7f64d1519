"""Qwen2.5-VL (https://arxiv.org/abs/2502.13923): Qwen2.5 with a vision tower, with three-dimensional positions."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.backends.families.config_fields import ConfigFields, HfConfig, MegatronFields
from dagrl.backends.families.qwen2 import Qwen2
from dagrl.backends.families.vision import VisionTower, mrope_faults, rope_fields, tower_fields, tower_sizes


class Qwen25Vl(Qwen2):
    """Models of Qwen2.5-VL. The tower is Hugging Face's own module, on each rank of the first pipeline stage."""

    model_type = "qwen2_5_vl"
    has_vision = True
    rope_kinds = ("default", "mrope")
    # The fused kernel would count positions itself.
    transformer_defaults = {**Qwen2.transformer_defaults, "apply_rope_fusion": False}

    def vision(self, config: ConfigFields) -> VisionTower:
        return VisionTower(**tower_sizes(tower_fields(self.model_type, config)))

    def transformer_fields(self, config: ConfigFields) -> MegatronFields:
        rope = rope_fields(config)
        return {"mrope_section": list(rope["mrope_section"])} if "mrope_section" in rope else {}

    def rope_arguments(self, config: ConfigFields) -> MegatronFields:
        return {**super().rope_arguments(config), "position_embedding_type": "mrope"}

    def conflicts(self, config: HfConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        yield from mrope_faults(config, rope_fields(config).get("mrope_section"))


FAMILY = Qwen25Vl()
