"""Gemma 3 (https://arxiv.org/abs/2503.19786), its language model: five layers with windows to each without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dagrl.backends.families.config_fields import ConfigFields, HfConfig, MegatronFields
from dagrl.backends.families.gemma2 import POST_ATTENTION_NORM, Gemma2, sliding_layers
from dagrl.backends.families.parts import Attention


class Gemma3Text(Gemma2):
    """Gemma 3 without images."""

    model_type = "gemma3_text"
    rope_kinds = ("default", "linear")
    required = {**Gemma2.required, "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)}

    def attention(self, config: ConfigFields) -> Attention:
        return self.grouped_query_attention(config, qk_norm=True, post_norm=POST_ATTENTION_NORM)

    def transformer_fields(self, config: ConfigFields) -> MegatronFields:
        return {"interleaved_attn_pattern": (_period(config) - 1, 1)}

    def unsupported(self, config: ConfigFields) -> Iterator[tuple[str, str]]:
        yield from super().unsupported(config)
        if not isinstance(config.get("layer_types"), list):
            return
        period = _period(config)
        kinds = [int((layer + 1) % period != 0) for layer in range(len(config["layer_types"]))]
        if kinds != sliding_layers(config):
            yield "layer_types", "megatron-bridge has full_attention in every n-th layer of gemma3_text only"

    def unsupported_rope(self, config: ConfigFields, rope: HfConfig) -> Iterator[str]:
        kinds = [rope[kind] for kind in self.layer_kinds if isinstance(rope.get(kind), Mapping)]
        for kind in kinds or [rope]:
            yield from super().unsupported_rope(config, kind)


def _period(config: ConfigFields) -> int:
    sliding = sliding_layers(config)
    return sliding.index(0) + 1 if 0 in sliding else len(sliding) + 1


FAMILY = Gemma3Text()
