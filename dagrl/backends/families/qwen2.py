"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2412.15115): biases of queries, keys and values."""

from __future__ import annotations

from dagrl.backends.families.base import Family
from dagrl.backends.families.config_fields import ConfigFields
from dagrl.backends.families.parts import Attention


class Qwen2(Family):
    """Dense models of Qwen2 and Qwen2.5."""

    model_type = "qwen2"
    required = {"use_sliding_window": (False,)}

    def attention(self, config: ConfigFields) -> Attention:
        return self.grouped_query_attention(config, qkv_bias=True)


FAMILY = Qwen2()
