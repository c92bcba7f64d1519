"""Gemma 2 (https://arxiv.org/abs/2408.00118): capped logits, norms around each block, sliding windows."""

from __future__ import annotations

from typing import ClassVar

from dagrl.backends.families.base import Family
from dagrl.backends.families.config_fields import ABOVE_ZERO, COMMON_RANGES, ConfigFields, MegatronFields
from dagrl.backends.families.parts import Attention, GatedMlp

POST_ATTENTION_NORM = "post_attention_layernorm"


class Gemma2(Family):
    """Gemma 2."""

    model_type = "gemma2"
    bridged = True
    zero_centred_norms = True
    heads_divide_hidden = True
    sizes = ("head_dim",)
    activations = ("gelu_pytorch_tanh",)
    layer_kinds = ("full_attention", "sliding_attention")
    rope_kinds: ClassVar[tuple[str, ...]] = ("default",)
    required = {"attention_bias": (False,), "use_bidirectional_attention": (False,), "tie_word_embeddings": (True,)}
    ranges = {
        **COMMON_RANGES,
        **dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), ABOVE_ZERO),
    }

    def attention(self, config: ConfigFields) -> Attention:
        return self.grouped_query_attention(config, post_norm=POST_ATTENTION_NORM)

    def mlp(self, config: ConfigFields) -> GatedMlp:
        return GatedMlp(
            config.size("hidden_size"),
            config.size("intermediate_size"),
            norm="pre_feedforward_layernorm",
            post_norm="post_feedforward_layernorm",
        )

    def transformer_fields(self, config: ConfigFields) -> MegatronFields:
        return {
            "softmax_scale": config["query_pre_attn_scalar"] ** -0.5,
            "window_attn_skip_freq": sliding_layers(config),
        }


def sliding_layers(config: ConfigFields) -> list[int]:
    """Return 1 for each layer with a sliding window, and 0 for the others."""
    return [int(kind == "sliding_attention") for kind in config["layer_types"]]


FAMILY = Gemma2()
