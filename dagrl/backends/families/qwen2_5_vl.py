"""Qwen2.5-VL (https://arxiv.org/abs/2502.13923): Qwen2.5 behind a vision tower, with three-dimensional positions."""

from __future__ import annotations

from typing import Any

from dagrl.backends.families.config_fields import ConfigFields
from dagrl.backends.families.qwen2 import Qwen2
from dagrl.backends.families.vision import VisionTower
from dagrl.models.library_classes import config_class


class Qwen25Vl(Qwen2):
    """Models of Qwen2.5-VL. The tower is Hugging Face's own module, on each rank of the first pipeline stage."""

    model_type = "qwen2_5_vl"
    sees = True
    rope_kinds = ("default", "mrope")
    # The fused kernel would count positions itself.
    transformer_defaults = {**Qwen2.transformer_defaults, "apply_rope_fusion": False}

    def vision(self, config: ConfigFields) -> VisionTower:
        """Return the tower."""
        given = {**config_class("qwen2_5_vl", part="vision").defaults, **(config.get("vision_config") or {})}
        fields = ConfigFields(given)
        return VisionTower(
            width=fields.size("hidden_size"),
            depth=fields.size("depth"),
            mlp_width=fields.size("intermediate_size"),
            patch=fields.size("patch_size"),
            merge=fields.size("spatial_merge_size"),
            frames=fields.size("temporal_patch_size"),
            output=fields.size("out_hidden_size"),
        )

    def transformer_fields(self, config: ConfigFields) -> dict[str, Any]:
        """Return the sections of the rotary embedding."""
        rope = config.get("rope_scaling") or config["rope_parameters"]
        return {"mrope_section": list(rope["mrope_section"])} if "mrope_section" in rope else {}

    def rope_arguments(self, config: ConfigFields) -> dict[str, Any]:
        """Return the kind of positions with their base."""
        return {**super().rope_arguments(config), "position_embedding_type": "mrope"}


FAMILY = Qwen25Vl()
