"""Megatron-bridge's provider of a model: Megatron's config and the model of a Hugging Face config.

A provider is a TransformerConfig that also builds its model. `bridge` converts the weights of such a model. Imports
megatron-bridge when it is called; see `bridge_library`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

from dagrl.backends.families.config_fields import MegatronFields
from dagrl.backends.megatron.engine.bridge_library import import_bridge
from dagrl.backends.megatron.section import padded_vocab_size

if TYPE_CHECKING:
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from transformers import PretrainedConfig

_LATENT_NORM_EPSILON = 1e-6
"""Epsilon of the latent norms in the models' published code, independent of the config's epsilon."""


class DeepseekLatentAttention(MLASelfAttention):
    """Differs from Megatron's class in two points, to give the same numbers as the published models.

    Latent norms have a separate epsilon; and if queries have no latent (``q_lora_rank: null``), their projection has no
    norm, which Megatron 0.19 adds if the keys' latent has one.
    """

    def __init__(self, config: MLATransformerConfig, *args: object, **kwargs: object) -> None:
        own = copy.copy(config)
        own.layernorm_epsilon = _LATENT_NORM_EPSILON
        super().__init__(own, *args, **kwargs)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, object]:
        classes: dict[str, object] = super()._resolve_qk_norm_config(submodules)
        if self.config.q_lora_rank is None:
            classes["linear_q_proj"] = submodules.linear_q_proj
        return classes


def use_latent_norms(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Replace latent attention in all layers of `block` by `DeepseekLatentAttention`; changes the specs in place."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        if isinstance(attention, ModuleSpec) and attention.module is MLASelfAttention:
            attention.module = DeepseekLatentAttention
    return block


_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_DEFAULTS = {
    # Megatron's own spec: kernels depend on the machine.
    "attention_backend": AttnBackend.auto,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "persist_layer_norm": False,
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
    # Layers that predict further tokens are not trained.
    "mtp_num_layers": None,
}


def make_provider(hf_config: PretrainedConfig) -> GPTModelProvider:
    """The provider of the model, whose fields may still be changed. ValueError for an unknown model."""
    library = import_bridge()
    if not library.knows(hf_config):
        raise ValueError(
            f"megatron-bridge does not know model type {hf_config.model_type!r}; install the version of "
            "requirements/bridge.txt"
        )
    provider = library.auto_bridge(hf_config).to_megatron_provider(load_weights=False)
    for name, value in _DEFAULTS.items():
        setattr(provider, name, value)
    if provider.window_size:
        # The only way in which Transformer Engine's windows and sinks split sequences over ranks.
        provider.cp_comm_type = "a2a"
    return provider


def finalize(provider: GPTModelProvider, fields: MegatronFields) -> GPTModelProvider:
    """Set `fields` of the config, and compute derived fields. ValueError if Megatron rejects them."""
    for name, value in fields.items():
        setattr(provider, name, value)
    try:
        provider.finalize()
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"transformer: Megatron rejects these fields: {error}") from error
    return provider


def provide(
    provider: GPTModelProvider, hf_config: PretrainedConfig, *, first: bool, last: bool, stage: int | None, tied: bool
) -> GPTModel:
    """Build the layers of one pipeline stage, or of one of its virtual stages; `first` and `last` have the ends.

    Megatron's parallel state must be initialised.
    """
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    provider.vocab_size = padded_vocab_size(hf_config.vocab_size, provider.tensor_model_parallel_size)
    provider.should_pad_vocab = False
    provider.share_embeddings_and_output_weights = tied
    provider.parallel_output = True
    make_spec = provider.transformer_layer_spec
    if provider.multi_latent_attention or getattr(provider, "attn_logit_softcapping", None):
        provider.transformer_layer_spec = partial(_with_own_attention, make_spec)
    try:
        model = provider.provide(pre_process=first, post_process=last, vp_stage=stage)
    finally:
        provider.transformer_layer_spec = make_spec
    for module in model.modules():
        if (norm := getattr(module, "post_layernorm", None)) is not None:
            # megatron-bridge keeps Transformer Engine's default for them.
            norm.eps = provider.layernorm_epsilon
    _add_router_biases_apart(model)
    return model


def _add_router_biases_apart(model: torch.nn.Module) -> None:
    """Make all routers of `model` with a bias, such as gpt-oss's, add it after the product.

    Megatron gives the bias to Transformer Engine's matrix product. cuBLAS then reads it in the logits' type, float32:
    from a bfloat16 bias it reads wrong values, past its end.
    """
    for module in model.modules():
        if isinstance(module, TopKRouter) and module.bias is not None:
            module.gating = partial(_router_logits, module)


def _router_logits(router: TopKRouter, hidden: torch.Tensor) -> torch.Tensor:
    dtype = _ROUTER_DTYPES.get(router.config.moe_router_dtype or "", hidden.dtype)
    return router_gating_linear(hidden, router.weight, None, dtype) + router.bias.to(dtype)


def _with_own_attention(
    make_spec: Callable[..., ModuleSpec | TransformerBlockSubmodules],
    config: TransformerConfig,
    vp_stage: int | None = None,
) -> ModuleSpec | TransformerBlockSubmodules:
    """The layer spec, with latent attention like published models', or attention that caps scores.

    megatron-bridge's caps do not support packed sequences.
    """
    staged = {"vp_stage": vp_stage} if "vp_stage" in signature(make_spec).parameters else {}
    spec = make_spec(config, **staged)
    if config.multi_latent_attention:
        return use_latent_norms(spec) if isinstance(spec, TransformerBlockSubmodules) else spec
    for layer in spec.layer_specs if isinstance(spec, TransformerBlockSubmodules) else [spec]:
        attention = layer.submodules.self_attention
        assert isinstance(attention, ModuleSpec)
        attention.submodules.core_attention = _packed_attention()
    return spec


def _packed_attention() -> type:
    if not torch.cuda.is_available():
        from dagrl.backends.megatron.engine.cpu.modules import TEDotProductAttention

        return TEDotProductAttention
    from dagrl.backends.megatron.engine.flex_attention import FlexAttention

    return FlexAttention
