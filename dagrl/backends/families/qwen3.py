"""Qwen3 (https://arxiv.org/abs/2505.09388): queries and keys normed head by head."""

from __future__ import annotations

from dagrl.backends.families.base import Family
from dagrl.backends.families.config_fields import ConfigFields
from dagrl.backends.families.parts import Attention


class Qwen3(Family):
    """Dense models of Qwen3."""

    model_type = "qwen3"
    required = {"attention_bias": (False,), "use_sliding_window": (False,)}

    def attention(self, config: ConfigFields) -> Attention:
        return self.grouped_query_attention(config, qk_norm=True)


FAMILY = Qwen3()
