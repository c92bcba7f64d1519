"""Qwen3-VL (https://arxiv.org/abs/2511.21631): Qwen3 with a vision tower, which also adds to its first layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dagrl.backends.families.config_fields import ConfigFields, HfConfig, MegatronFields
from dagrl.backends.families.qwen3 import Qwen3
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.families.tensor_maps import MappedTensor
from dagrl.backends.families.vision import VisionTower, mrope_faults, rope_fields, tower_fields, tower_sizes

_EXTRA_LAYERS = (8, 16, 24)
"""The default of transformers."""


class Qwen3Vl(Qwen3):
    """Dense models of Qwen3-VL. The tower is Hugging Face's own module, on each rank of the first pipeline stage."""

    model_type = "qwen3_vl"
    has_vision = True
    section: ClassVar[list[int]] = [24, 20, 20]
    """The default of transformers."""
    required = {"attention_bias": (False,)}
    rope_kinds = ("default", "mrope")
    # The fused kernel would count positions itself.
    transformer_defaults = {**Qwen3.transformer_defaults, "apply_rope_fusion": False}

    def vision(self, config: ConfigFields) -> VisionTower:
        fields = tower_fields(self.model_type, config)
        return DeepTower(
            **tower_sizes(fields),
            prefix="model.visual.",
            extra_layers=tuple(fields.get("deepstack_visual_indexes", _EXTRA_LAYERS)),
            positions=fields.size("num_position_embeddings"),
        )

    def shape(self, config: ConfigFields) -> ModelShape:
        return replace(super().shape(config), text_prefix="model.language_model.")

    def transformer_fields(self, config: ConfigFields) -> MegatronFields:
        return {"mrope_section": list(self._section(config))}

    def rope_arguments(self, config: ConfigFields) -> MegatronFields:
        kind = {"position_embedding_type": "mrope", "interleaved_sections": True}
        return {**super().rope_arguments(config), **kind}

    def conflicts(self, config: HfConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        yield from mrope_faults(config, self._section(config), self.rotated_part(config))
        if not rope_fields(config).get("mrope_interleaved"):
            # Transformers uses the type of the model, the servers use the field.
            yield "rope_parameters has no mrope_interleaved, which servers read; set it to true"

    def rotated_part(self, config: HfConfig) -> float:
        """Return the rotated fraction of each head."""
        return 1.0

    def _section(self, config: HfConfig) -> Any:
        return rope_fields(config).get("mrope_section", self.section)


@dataclass(frozen=True, slots=True)
class DeepTower(VisionTower):
    """A tower of Qwen3-VL's kind, with layer norms, learned positions and a merger for each extra layer."""

    positions: int = 0
    """Rows of the embedding of positions."""

    def tensors(self) -> Iterator[MappedTensor]:
        width, merged = self.width, self.width * self.merge**2
        yield self._whole("patch_embed.proj.weight", (width, self.channels, self.frames, self.patch, self.patch))
        yield self._whole("patch_embed.proj.bias", (width,))
        yield self._whole("pos_embed.weight", (self.positions, width))
        for block in (f"blocks.{number}" for number in range(self.depth)):
            yield from self._norm(f"{block}.norm1", width)
            yield from self._norm(f"{block}.norm2", width)
            yield from self._linear(f"{block}.attn.qkv", 3 * width, width)
            yield from self._linear(f"{block}.attn.proj", width, width)
            yield from self._linear(f"{block}.mlp.linear_fc1", self.mlp_width, width)
            yield from self._linear(f"{block}.mlp.linear_fc2", width, self.mlp_width)
        mergers = [("merger", width)]
        mergers += [(f"deepstack_merger_list.{number}", merged) for number in range(len(self.extra_layers))]
        for merger, normed in mergers:
            yield from self._norm(f"{merger}.norm", normed)
            yield from self._linear(f"{merger}.linear_fc1", merged, merged)
            yield from self._linear(f"{merger}.linear_fc2", self.output, merged)

    def _norm(self, name: str, width: int) -> Iterator[MappedTensor]:
        for kind in ("weight", "bias"):
            yield self._whole(f"{name}.{kind}", (width,))


FAMILY = Qwen3Vl()
