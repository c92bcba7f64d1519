"""Shapes of published models, for tests of estimates."""

from __future__ import annotations

from typing import Any

from dagrl.backends.families.registry import shape_of

_QWEN3: dict[str, Any] = {"model_type": "qwen3", "vocab_size": 151936}
QWEN3_1B7 = shape_of(
    _QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}
)
QWEN3_8B = shape_of(
    _QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "num_key_value_heads": 8}
)
QWEN3_30B = shape_of(
    {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144}
    | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
)
SIXTEEN_LAYERS = shape_of(
    {"model_type": "qwen3", "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 6144}
    | {"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8}
)
"""The 0.94 billion parameters that sleep and offload were measured with."""
DEEPSEEK_V3 = shape_of({"model_type": "deepseek_v3"})
