"""Hugging Face models of each family, small enough to run them all; `conftest` makes fixtures of them.

Import as ``from tiny_models import tiny_hf_model``: pytest's `pythonpath` holds this folder.
"""

import functools
from typing import Any

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
# A padding token would have no gradient in Hugging Face's models.
_COMMON = {
    "pad_token_id": None,
    "vocab_size": 59,
    "num_hidden_layers": 4,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 32,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_UNGROUPED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
_LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}

_GATED_DELTA = {
    "head_dim": 12,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope": {"partial_rotary_factor": 0.5},
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
DENSE: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "qwen3_tied": {"head_dim": 12, "tie_word_embeddings": True},
    "llama": {},
    "llama_scaled": {"rope": _LLAMA3},
    "qwen3_5_text": _GATED_DELTA,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 12, "num_experts": 4, "norm_topk_prob": True, **_EXPERTS},
    # A dense layer among the others, and weights of experts that do not add up to 1.
    "qwen3_moe_mixed": {
        "head_dim": 12,
        "num_experts": 8,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
        **_EXPERTS,
        "num_experts_per_tok": 3,
    },
    "qwen2_moe": {
        **_EXPERTS,
        "num_experts": 4,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 1,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **_EXPERTS,
        **_LATENT,
        "q_lora_rank": 16,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "num_key_value_heads": 4,
    },
    "deepseek_v3_yarn": {
        **_EXPERTS,
        **_LATENT,
        **_UNGROUPED,
        "q_lora_rank": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "rope": _YARN,
    },
    # Its norms have another epsilon than those of latents, by far.
    "deepseek_v3_moonlight": {
        **_EXPERTS,
        **_LATENT,
        **_UNGROUPED,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-2,
    },
}

BRIDGED: dict[str, dict[str, Any]] = {
    "mistral": {"head_dim": 12, "sliding_window": 4},
    "gemma2": {
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "sliding_window": 4,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 1.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "sliding_window": 4,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        },
    },
    "glm4_moe": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 4,
        "rope": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "nemotron": {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "qwen3_next": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 40, **_GATED_DELTA},
    "qwen3_5_moe_text": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 40, **_GATED_DELTA},
}
"""Models that megatron-bridge builds."""

_ONE = {"num_experts_per_tok": 1}
ONE_EXPERT: dict[str, dict[str, Any]] = {
    "mixtral_one": {"num_local_experts": 4, **_ONE},
    "qwen3_moe_one": {**MIXTURES["qwen3_moe"], **_ONE},
    "qwen3_moe_one_unnormalised": {**MIXTURES["qwen3_moe"], **_ONE, "norm_topk_prob": False},
    "deepseek_v3_one_unnormalised": {**MIXTURES["deepseek_v3_moonlight"], **_ONE, "norm_topk_prob": False},
}
"""Mixtures that send each token to a single expert."""


def tiny_model_spec(name: str) -> Any:
    """A model of that name's config with random weights, for a pipeline."""
    from dagrl.config.schema import ModelSpec

    fields = {**_SIZES, **_COMMON, **{**DENSE, **MIXTURES, **BRIDGED}[name]}
    rope = {"rope_parameters": {"rope_theta": 1e4, **fields.pop("rope")}} if "rope" in fields else {}
    init = {"model_type": name, **fields, **rope}
    return ModelSpec.model_validate({"init": init, "tokenizer": {"kind": "characters", "alphabet": "ab"}})


@functools.cache
def tiny_hf_model(name: str, **changes: Any) -> Any:
    """A model of a few thousand random weights, float32, on the CPU; `changes` are of its sizes.

    Its 59 tokens are no multiple of anything, and its norms and biases are not those of a fresh model.
    """
    import torch
    import transformers

    fields = dict({**DENSE, **MIXTURES, **ONE_EXPERT, **BRIDGED}[name])
    family = max((known for known in transformers.CONFIG_MAPPING if name.startswith(known)), key=len)
    rope = fields.pop("rope", {})
    if "full_attention" not in rope:
        rope = {"rope_type": "default", "rope_theta": 5e5} | rope
    # These caps and sinks are not in torch's function.
    attention = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    config = transformers.AutoConfig.for_model(
        family, rope_parameters=rope, attn_implementation=attention, **{**_SIZES, **_COMMON, **fields, **changes}
    )
    # With flash-linear-attention, some norms are made on a GPU.
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).cpu()
    generator = torch.Generator().manual_seed(7)
    for parameter, tensor in model.state_dict(keep_vars=True).items():
        mean = 1.0 if isinstance(tensor, torch.nn.Parameter) and tensor.dim() == 1 else 0.0
        if "linear_key_head_dim" in fields and parameter.endswith("norm.weight") and "linear_attn" not in parameter:
            # Its norms multiply with 1 + weight.
            mean = 0.0
        if parameter.endswith("A_log"):
            # States that decay within a few tokens would be differences of large numbers.
            mean = -2.0
        # What a convolution of small weights gives is normed: its rounding would grow.
        torch.nn.init.normal_(tensor, mean, 0.5 if "conv1d" in parameter else 0.1, generator=generator)
    return model.eval()


def tiny_scorer(seed: int, **fields: Any) -> Any:
    """A sequence classifier of Hugging Face's with one label, unless `fields` of its config say otherwise."""
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    own = {"num_hidden_layers": 2, "head_dim": 8, "num_labels": 1, "pad_token_id": None}
    torch.manual_seed(seed)
    return Qwen3ForSequenceClassification(Qwen3Config(**{**_SIZES, **own, **fields}))
