"""Qwen3-Next: gated delta nets in three of four layers, and experts."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.backends.families.config_fields import ConfigFields, MegatronFields
from dagrl.backends.families.gated_delta import LINEAR_RANGES, LINEAR_SIZES, GatedDeltaFamily, rotated_part
from dagrl.backends.families.qwen2_moe import Qwen2Moe


class Qwen3Next(GatedDeltaFamily, Qwen2Moe):
    """Qwen3-Next."""

    model_type = "qwen3_next"
    bridged = True
    # Its projections are published in a different order from the one in the part.
    has_tables = False
    # Not tested with inference engines.
    reports_routed_experts = False
    required = {"attention_bias": (False,), "mlp_only_layers": ([],), "decoder_sparse_step": (1,)}
    sizes = (*Qwen2Moe.sizes, *LINEAR_SIZES)
    ranges = {**Qwen2Moe.ranges, **LINEAR_RANGES}

    def transformer_fields(self, config: ConfigFields) -> MegatronFields:
        # megatron-bridge reads it from the field of older files.
        return {**super().transformer_fields(config), **rotated_part(config)}

    def unsupported(self, config: ConfigFields) -> Iterator[tuple[str, str]]:
        yield from super().unsupported(config)
        if config.get("norm_topk_prob") is False:
            yield "norm_topk_prob", "megatron-bridge normalises the weights of chosen experts; set it to true"


FAMILY = Qwen3Next()
