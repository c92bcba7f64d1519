"""The layers of a model that dagrl describes to Megatron, gated delta nets among them."""

from __future__ import annotations

from copy import copy
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

from dagrl.backends.megatron.engine.provider import use_latent_norms


def decoder_spec(config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    """Return the spec of a stage's layers."""
    if config.experimental_attention_variant is None:
        return use_latent_norms(get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage))
    spec = variants.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=stage)
    attentions = [layer.submodules.self_attention for layer in spec.layer_specs or ()]
    # Layers share a spec.
    for attention in {id(attention): attention for attention in attentions}.values():
        if attention.module is GatedDeltaNet:
            attention.submodules.out_norm = _uncentred(attention.submodules.out_norm)
    return spec


def check_kernels() -> None:
    """Raise ValueError if a GPU has no kernels for gated delta nets, or some with wrong gradients."""
    if not torch.cuda.is_available():
        return
    if find_spec("fla") is None:
        raise ValueError("gated delta nets need the kernels of flash-linear-attention; install flash-linear-attention")
    triton = version("triton")
    # https://github.com/fla-org/flash-linear-attention/issues/640
    wrong = torch.cuda.get_device_capability() == (9, 0) and Version("3.4.0") <= Version(triton) < Version("3.7.1")
    if wrong and find_spec("tilelang") is None:
        raise ValueError(
            f"Triton {triton} computes wrong gradients of gated delta nets on Hopper GPUs; install tilelang, "
            "which flash-linear-attention uses in its place"
        )


def _uncentred(norm: type) -> type:
    """Return `norm` for a published weight that is not centred on zero, unlike all other norms."""

    class Uncentred:
        def __new__(cls, config: TransformerConfig, **arguments: Any) -> Any:
            own = copy(config)
            own.layernorm_zero_centered_gamma = False
            return norm(config=own, **arguments)

    return Uncentred
