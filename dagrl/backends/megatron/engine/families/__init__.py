"""The model families that the engine knows: what a Hugging Face config means to Megatron, and which tensor is which.

A family is a table, in `dense`, `mixture` or `latent`. `config` and `model` build from its fields, `hf_weights` and
`convert` go by its tensors; none of them knows any family. Hugging Face's names are those of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.nn.functional import silu

from dagrl.backends.megatron.engine.families.dense import DENSE, head_dim
from dagrl.backends.megatron.engine.families.latent import LATENT
from dagrl.backends.megatron.engine.families.mixture import MIXTURE
from dagrl.backends.megatron.engine.families.table import Family, MappedTensor
from dagrl.backends.megatron.engine.tensor_maps import Replicated, VocabParallel
from dagrl.models.architecture import unsupported
from dagrl.models.tensor_shapes import SCORE

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import PretrainedConfig

__all__ = [
    "Family",
    "MappedTensor",
    "config_class",
    "family_of",
    "rope_fields",
    "tensors",
    "transformer_defaults",
    "transformer_fields",
]

_FAMILIES: dict[str, Family] = {**DENSE, **MIXTURE, **LATENT}


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model. ValueError where there is none for it, or where the config asks for more than it has."""
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"the megatron engine does not know model type {config.model_type!r}; it knows {', '.join(_FAMILIES)}"
        )
    for _, reason in unsupported(config.to_dict()):
        raise ValueError(reason)
    return family


def config_class(config: PretrainedConfig) -> type[TransformerConfig]:
    """Megatron's class of configs for this model."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    return MLATransformerConfig if family_of(config).latent else TransformerConfig


def transformer_fields(config: PretrainedConfig) -> dict[str, Any]:
    """Fields of `config_class` that follow from a Hugging Face config. ValueError as in `family_of`."""
    common = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_dim(config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "num_moe_experts": None,
        "mtp_num_layers": None,
    }
    return {**common, **family_of(config).fields(config)}


def transformer_defaults(config: PretrainedConfig) -> dict[str, Any]:
    """Fields of `config_class` that suit the architecture, and that the pipeline file may change."""
    return dict(family_of(config).defaults)


def rope_fields(config: PretrainedConfig) -> dict[str, Any]:
    """GPTModel's keyword arguments for the rotary embedding. ValueError for a scaling that megatron gets wrong."""
    family = family_of(config)
    if family.rope is not None:
        return family.rope(config)
    rope = dict(config.rope_parameters)
    if rope.get("rope_type", "default") == "default":
        return {"rotary_base": rope["rope_theta"]}
    return {"rotary_base": rope["rope_theta"], "rope_scaling": True, "rope_scaling_factor": rope["factor"]}


def tensors(config: PretrainedConfig, padded_vocab_size: int, head: str = "lm") -> Iterator[MappedTensor]:
    """All tensors of a model, layer after layer, experts one after the other.

    An output layer tied to the embedding is not among them. With a value or reward `head` the output layer is that.
    """
    vocabulary = VocabParallel(config.vocab_size, padded_vocab_size)
    yield MappedTensor("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary)
    family = family_of(config)
    for layer in range(config.num_hidden_layers):
        for row in family.layer(config, layer):
            numbers = range(family.experts(config)) if "{expert}" in row.megatron else [None]
            yield from (_numbered(row, layer, expert) for expert in numbers)
    yield MappedTensor("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated())
    if head != "lm":
        yield MappedTensor("output_layer.weight", (SCORE,), Replicated())
    elif not config.tie_word_embeddings:
        yield MappedTensor("output_layer.weight", ("lm_head.weight",), vocabulary)


def _numbered(row: MappedTensor, layer: int, expert: int | None) -> MappedTensor:
    return replace(
        row,
        megatron=f"decoder.layers.{layer}.{row.megatron.format(expert=expert)}",
        hf=tuple(f"model.layers.{layer}.{name.format(expert=expert)}" for name in row.hf),
        layer=layer,
        expert=expert,
    )
