"""What the megatron engine asks of a model's Hugging Face config: the families it knows, and what each can be."""

from __future__ import annotations

from typing import Any

REQUIRED: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    "qwen2": {"hidden_act": ("silu",), "use_sliding_window": (False,)},
    "qwen3": {"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
    "qwen3_moe": {"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
    "mixtral": {"hidden_act": ("silu",), "sliding_window": (None,), "router_jitter_noise": (0.0,)},
    "deepseek_v3": {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "rope_interleave": (True,),
        # These three are in config.json only.
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
}
"""Model type -> fields of its config, each with the values that the engine can take, the usual one first."""

FAMILIES = tuple(REQUIRED)
"""Hugging Face model types that the megatron engine knows by itself."""

ROPE_KINDS = dict.fromkeys(FAMILIES, ("default", "llama3")) | {"deepseek_v3": ("default", "yarn")}
"""Model type -> kinds of rotary embedding (``rope_type``) that the engine computes as Hugging Face does."""

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of ``llama3`` rope scaling that Megatron holds as constants."""
