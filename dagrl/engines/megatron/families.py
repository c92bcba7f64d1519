"""The model families that the engine knows: what a Hugging Face config means to Megatron, and which tensor is which.

A family is a table. `model` builds from its fields, `hf_weights` converts by its tensors; neither knows any family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn.functional import silu

from dagrl.engines.megatron.tensor_maps import GateUp, GroupedQkv, Parallel, Replicated, TensorMap, VocabParallel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Maps = tuple[tuple[str, tuple[str, ...], TensorMap], ...]
"""Megatron's name, Hugging Face's names, and how they relate; inside a layer, both without the layer's prefix."""


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one architecture."""

    fields: Callable[[PretrainedConfig], dict[str, Any]]
    """TransformerConfig fields that the architecture fixes."""
    layer: Callable[[PretrainedConfig], Maps]
    """The tensors of one layer."""
    requires: dict[str, tuple[Any, ...]]
    """Fields of the Hugging Face config, each with the values that the engine can take."""


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One Megatron parameter and the Hugging Face tensors in it."""

    megatron: str
    hf: tuple[str, ...]
    map: TensorMap


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model. ValueError where there is none for it, or where the config asks for more than it has."""
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"the megatron engine does not know model type {config.model_type!r}; it knows {', '.join(_FAMILIES)}"
        )
    for name, supported in family.requires.items():
        value = getattr(config, name, supported[0])
        if value not in supported:
            raise ValueError(
                f"the megatron engine has no {config.model_type} with {name}: {value!r}; "
                f"it takes {' or '.join(repr(option) for option in supported)}"
            )
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise ValueError("the megatron engine has no layers of sliding-window attention; set use_sliding_window: false")
    return family


def transformer_fields(config: PretrainedConfig) -> dict[str, Any]:
    """TransformerConfig fields that follow from a Hugging Face config."""
    common = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": _head_dim(config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
    }
    return {**common, **family_of(config).fields(config)}


def rope_fields(config: PretrainedConfig) -> dict[str, Any]:
    """GPTModel's keyword arguments for the rotary embedding. ValueError for a scaling that megatron gets wrong."""
    rope = dict(config.rope_parameters)
    kind = rope.get("rope_type", "default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            "the megatron engine rotates whole heads only; rope_parameters.partial_rotary_factor must be 1"
        )
    if kind == "default":
        return {"rotary_base": rope["rope_theta"]}
    if kind != "llama3":
        raise ValueError(f"the megatron engine has no rope scaling of type {kind!r}; it knows 'default' and 'llama3'")
    wrong = {name: rope.get(name) for name, value in _LLAMA3_ROPE.items() if rope.get(name) != value}
    if wrong:
        raise ValueError(f"megatron has llama3 rope scaling for {_LLAMA3_ROPE} only; this model has {wrong}")
    return {"rotary_base": rope["rope_theta"], "rope_scaling": True, "rope_scaling_factor": rope["factor"]}


def tensors(config: PretrainedConfig, padded_vocab_size: int) -> Iterator[MappedTensor]:
    """All parameters of a model, layer after layer. An output layer tied to the embedding is not among them."""
    vocabulary = VocabParallel(config.vocab_size, padded_vocab_size)
    yield MappedTensor("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary)
    layer_maps = family_of(config).layer(config)
    for layer in range(config.num_hidden_layers):
        for megatron, hf, tensor_map in layer_maps:
            names = tuple(f"model.layers.{layer}.{name}" for name in hf)
            yield MappedTensor(f"decoder.layers.{layer}.{megatron}", names, tensor_map)
    yield MappedTensor("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated())
    if not config.tie_word_embeddings:
        yield MappedTensor("output_layer.weight", ("lm_head.weight",), vocabulary)


def _head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _attention(config: PretrainedConfig) -> Maps:
    qkv = GroupedQkv(config.num_key_value_heads, _head_dim(config))
    projections = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
    return (
        ("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), Replicated()),
        ("self_attention.linear_qkv.weight", projections, qkv),
        ("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), Parallel(dim=1)),
    )


def _qkv_bias(config: PretrainedConfig) -> Maps:
    biases = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
    return (("self_attention.linear_qkv.bias", biases, GroupedQkv(config.num_key_value_heads, _head_dim(config))),)


_QK_NORM: Maps = (
    ("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), Replicated()),
    ("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), Replicated()),
)

_GATED_MLP: Maps = (
    ("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",), Replicated()),
    ("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GateUp()),
    ("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), Parallel(dim=1)),
)

# Megatron takes the factor from outside, and holds these three as constants.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_FAMILIES: dict[str, Family] = {
    "llama": Family(
        fields=lambda config: {},
        layer=lambda config: (*_attention(config), *_GATED_MLP),
        requires={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    ),
    "qwen2": Family(
        fields=lambda config: {"add_qkv_bias": True},
        layer=lambda config: (*_attention(config), *_qkv_bias(config), *_GATED_MLP),
        requires={"hidden_act": ("silu",), "use_sliding_window": (False,)},
    ),
    "qwen3": Family(
        fields=lambda config: {"qk_layernorm": True},
        layer=lambda config: (*_attention(config), *_QK_NORM, *_GATED_MLP),
        requires={"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
    ),
}


def transformer_defaults(config: PretrainedConfig) -> dict[str, Any]:
    """TransformerConfig fields that an architecture is usually trained with; the pipeline file may change them."""
    return {}


def config_class(config: PretrainedConfig) -> Any:
    """TransformerConfig, or the one of latent attention."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig
