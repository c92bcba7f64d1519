"""Models with gated delta nets ("Gated Delta Networks", arXiv 2412.06464) in place of attention in most layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from dagrl.backends.families.base import Family
from dagrl.backends.families.config_fields import (
    COMMON_RANGES,
    COUNT,
    HEADS,
    ConfigFields,
    HfConfig,
    MegatronFields,
    is_size,
)
from dagrl.backends.families.parts import Attention, LinearAttention
from dagrl.backends.families.shape import ModelShape

LINEAR = "linear_attention"
LINEAR_SIZES = ("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads")
LINEAR_RANGES = {**dict.fromkeys(LINEAR_SIZES, HEADS), "linear_conv_kernel_dim": COUNT}


class GatedDeltaFamily(Family):
    """Gated delta nets, and gated attention in one layer of four."""

    zero_centred_norms = True
    shares_prefixes = False
    rotates_parts = True
    layer_kinds = ("full_attention", LINEAR)
    rope_kinds: ClassVar[tuple[str, ...]] = ("default",)
    sizes: ClassVar[tuple[str, ...]] = LINEAR_SIZES
    ranges = {**COMMON_RANGES, **LINEAR_RANGES}
    required = {"attention_bias": (False,)}

    def is_zero_centred(self, name: str) -> bool:
        others = ".linear_attn." in name or ".visual." in name
        return super().is_zero_centred(name) and not others

    def conflicts(self, config: HfConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        keys, values = config.get("linear_num_key_heads"), config.get("linear_num_value_heads")
        if is_size(keys) and is_size(values) and values % keys:
            yield f"linear_num_key_heads {keys} does not divide linear_num_value_heads {values}; choose a divisor"

    def attention(self, config: ConfigFields) -> Attention:
        return self.grouped_query_attention(config, qk_norm=True, gated=True)

    def shape(self, config: ConfigFields) -> ModelShape:
        linear = LinearAttention(
            hidden=config.size("hidden_size"),
            key_heads=config.size("linear_num_key_heads"),
            value_heads=config.size("linear_num_value_heads"),
            key_dim=config.size("linear_key_head_dim"),
            value_dim=config.size("linear_value_head_dim"),
            kernel=config.size("linear_conv_kernel_dim"),
        )
        return replace(super().shape(config), linear=linear, linear_layers=linear_layers(config))

    def transformer_fields(self, config: ConfigFields) -> MegatronFields:
        shape = self.shape(config)
        assert shape.linear
        linear = shape.linear.transformer_fields(shape.linear_layers)
        return {**super().transformer_fields(config), "layernorm_zero_centered_gamma": True, **linear}

    def rope_arguments(self, config: ConfigFields) -> MegatronFields:
        return {**super().rope_arguments(config), **rotated_part(config)}


def rotated_part(config: ConfigFields) -> MegatronFields:
    """Return Megatron's field for the rotated fraction of each head."""
    return {"rotary_percent": config["rope_parameters"].get("partial_rotary_factor", 1.0)}


def linear_layers(config: ConfigFields) -> tuple[bool, ...]:
    """Return for each layer whether it has a gated delta net."""
    layers, kinds = config.size("num_hidden_layers"), config.get("layer_types")
    if kinds:
        return tuple(kind == LINEAR for kind in kinds)
    every = config.get("full_attention_interval") or 4
    return tuple((layer + 1) % every != 0 for layer in range(layers))
