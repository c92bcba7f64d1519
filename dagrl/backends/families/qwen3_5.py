"""Qwen3.5 and Qwen3.6 as they are published: the dense language model with a vision tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dagrl.backends.families.config_fields import ConfigFields, HfConfig
from dagrl.backends.families.gated_delta import GatedDeltaFamily
from dagrl.backends.families.qwen3_vl import Qwen3Vl
from dagrl.backends.families.vision import VisionTower, rope_fields


class Qwen35(GatedDeltaFamily, Qwen3Vl):
    """Dense models of Qwen3.5. The tower is Qwen3-VL's, without its additions to the first layers."""

    model_type = "qwen3_5"
    rope_kinds = ("default", "mrope")
    section = [11, 11, 10]

    def vision(self, config: ConfigFields) -> VisionTower:
        return replace(super().vision(config), extra_layers=())

    def rotated_part(self, config: HfConfig) -> float:
        # The default of transformers.
        part: Any = rope_fields(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
        return float(part)


FAMILY = Qwen35()
