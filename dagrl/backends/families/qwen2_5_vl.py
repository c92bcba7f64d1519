"""Qwen2.5-VL (https://arxiv.org/abs/2502.13923): Qwen2.5 behind a vision tower, with three-dimensional positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dagrl.backends.families.config_fields import ConfigFields, is_size
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
        given = {**config_class(self.model_type, part="vision").defaults, **(config.get("vision_config") or {})}
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
        return {"mrope_section": list(_rope(config)["mrope_section"])}

    def rope_arguments(self, config: ConfigFields) -> dict[str, Any]:
        """Return the kind of positions with their base."""
        return {**super().rope_arguments(config), "position_embedding_type": "mrope"}

    def conflicts(self, config: Mapping[str, Any]) -> Iterator[str]:
        """Yield sections that are missing or do not fit a head, beside the common rules."""
        yield from super().conflicts(config)
        yield from mrope_faults(config, _rope(config).get("mrope_section"))


def mrope_faults(config: Mapping[str, Any], sections: Any) -> Iterator[str]:
    """Yield why `sections` have no frequencies for each of time, height and width of a position."""
    if not (isinstance(sections, list) and len(sections) == 3 and all(map(is_size, sections))):
        message = "rope_parameters has no mrope_section, three numbers of frequencies for time, height and width"
        yield f"{message}; copy config.json from where the model is published"
        return
    heads, hidden, head_dim = (config.get(name) for name in ("num_attention_heads", "hidden_size", "head_dim"))
    if not is_size(head_dim) and is_size(heads) and is_size(hidden):
        head_dim = hidden // heads
    if is_size(head_dim) and 2 * sum(sections) != head_dim:
        yield f"mrope_section adds up to {sum(sections)}, and half a head has {head_dim // 2}; make them equal"


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


FAMILY = Qwen25Vl()
