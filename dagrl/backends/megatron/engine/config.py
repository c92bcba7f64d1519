"""Megatron's TransformerConfig of an engine: fields from the model, from dagrl, and from the pipeline file.

`model` uses it. `dagrl.backends.families` translates the Hugging Face config.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn.functional import silu

from dagrl.backends.families.config_fields import MegatronFields
from dagrl.backends.families.registry import buildable
from dagrl.backends.megatron.engine.provider import finalize, make_provider
from dagrl.backends.megatron.fields import FP8_RECIPE
from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec
from dagrl.config.errors import suggest
from dagrl.model_files.number_formats import NUMBER_FORMATS

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def arguments_of(
    config_class: type, section: str, given: MegatronFields, *, defaults: MegatronFields, fixed: MegatronFields
) -> MegatronFields:
    """Keyword arguments of `config_class`: `defaults`, then the `given` ones of a `section`, then `fixed` ones.

    Names of number formats and enumerations become torch's and Megatron's objects. Raises ValueError for a name that
    the class lacks.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(config_class) if field.init}
    if unknown := sorted(given.keys() - kinds.keys()):
        message = f"{section}.{unknown[0]}: Megatron's {config_class.__name__} has no such field"
        raise ValueError(f"{message}; {suggest(unknown[0], kinds)}")
    return {**defaults, **{name: _value(kinds[name], value) for name, value in given.items()}, **fixed}


def build_config[Config](config_class: type[Config], section: str, arguments: MegatronFields) -> Config:
    """Build the config. Raises ValueError with the section if Megatron rejects the arguments."""
    try:
        return config_class(**arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{section}: Megatron rejects these fields: {error}") from error


def _value(kind: object, value: object) -> object:
    if not isinstance(value, str):
        return value
    if "torch.dtype" in str(kind) and value in NUMBER_FORMATS:
        return getattr(torch, NUMBER_FORMATS[value].torch_name)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind.__members__.get(value, value)
    return value


FP8_DEFAULTS = {
    "fp8_recipe": FP8_RECIPE,
    # Transformer Engine's cached weights in fp8 would stay on the GPU during sleep.
    "disable_parameter_transpose_cache": True,
}
"""Fields with ``fp8`` that differ from Megatron's defaults."""


def transformer_config(hf_config: PretrainedConfig, spec: MegatronEngineSpec) -> TransformerConfig:
    """Megatron's config: the fields of the model, the engine and ``spec.transformer``.

    Weights and activations are bfloat16 on a GPU and float32 without one, unless ``transformer.bf16`` is set.
    ValueError for fields that Megatron lacks or rejects.
    """
    family, fields = buildable(hf_config.to_dict())
    from_model = family.transformer_fields(fields) if family.bridged else transformer_fields(hf_config)
    provider = make_provider(hf_config) if family.bridged else None
    on_gpu = torch.cuda.is_available()
    # Fused with latent attention, rotation takes no angle for each token.
    shares_latents = spec.prefix_sharing and bool(from_model.get("multi_latent_attention"))
    defaults = {
        "bf16": on_gpu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Megatron's kernels are for these only.
        "apply_rope_fusion": on_gpu and not (provider and provider.multi_latent_attention) and not shares_latents,
        "bias_activation_fusion": on_gpu and (provider is None or provider.activation_func is silu),
        "deallocate_pipeline_outputs": True,
        # Megatron also requires it of models without experts, if stages send packs of any length.
        "moe_token_dispatcher_type": "alltoall",
        **(FP8_DEFAULTS if spec.fp8_recipe else {}),
        **family.transformer_defaults,
    }
    dtype = torch.bfloat16 if spec.transformer.get("bf16", on_gpu) is True else torch.float32
    fixed = {
        **from_model,
        **spec.parallel.model_dump(),
        **_pipeline_fields(spec.parallel),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "fp16": False,
        # The loss is a mean over the global batch.
        "calculate_per_token_loss": True,
        # All weights are loaded.
        "perform_initialization": False,
    }
    if provider is not None:
        arguments = arguments_of(type(provider), "transformer", spec.transformer, defaults=defaults, fixed=fixed)
        config: TransformerConfig = finalize(provider, arguments)
    else:
        kind = MLATransformerConfig if from_model.get("multi_latent_attention") else TransformerConfig
        config = _build(kind, arguments_of(kind, "transformer", spec.transformer, defaults=defaults, fixed=fixed))
    if shares_latents and config.apply_rope_fusion:
        raise ValueError("transformer.apply_rope_fusion: does not go with prefix_sharing of this model; remove it")
    stages = spec.parallel.vpp
    if config.virtual_pipeline_model_parallel_size != stages:
        raise ValueError(
            f"transformer.pipeline_model_parallel_layout: it has {config.virtual_pipeline_model_parallel_size} virtual "
            f"stages; say so in parallel.virtual_pipeline_model_parallel_size, which is {stages}"
        )
    return config


def transformer_fields(hf_config: PretrainedConfig) -> MegatronFields:
    """Fields of Megatron's config that follow from the model. ValueError if the engine cannot build it."""
    family, fields = buildable(hf_config.to_dict())
    shape = family.shape(fields)
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.dense_width,
        "normalization": "RMSNorm",
        "layernorm_epsilon": fields["rms_norm_eps"],
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "num_moe_experts": None,
        "mtp_num_layers": None,
        **shape.attention.transformer_fields(),
        **(shape.experts.transformer_fields(shape.mixture_layers) if shape.experts else {}),
        **family.transformer_fields(fields),
    }


def _build(kind: type[TransformerConfig], fields: MegatronFields) -> TransformerConfig:
    """Build the config, also for a router whose softmax is over a single chosen expert.

    Megatron refuses that, as such a router gets no gradient, but computes it if the field is set afterwards.
    """
    single = fields.get("moe_router_topk") == 1 and fields.get("moe_router_score_function") == "softmax"
    config = build_config(kind, "transformer", fields | ({"moe_router_pre_softmax": True} if single else {}))
    if single:
        config.moe_router_pre_softmax = fields["moe_router_pre_softmax"]
    return config


def _pipeline_fields(parallel: ParallelSpec) -> MegatronFields:
    if parallel.pp == 1:
        return {}
    # Packed micro-batches have different lengths.
    fields: MegatronFields = {"variable_seq_lengths": True}
    if parallel.vpp is not None:
        # With two stages and batched messages the interleaved schedule silently mixes up its messages.
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return fields
