"""Rules of low-rank adapters: requirements on layout, model and environment."""

from __future__ import annotations

import importlib.util

from dagrl.backends.backend import EngineCheck
from dagrl.backends.families.bridge_models import is_installed
from dagrl.backends.families.registry import model_shape
from dagrl.backends.families.tensors import model_tensors
from dagrl.backends.megatron.adapter_folder import adapter_faults
from dagrl.backends.megatron.lora import LATENT_LAYERS, PLAIN_LAYERS, LoraSpec
from dagrl.backends.megatron.report import report
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.config.errors import removal

BRIDGE_INSTALL = "uv pip install --no-deps -r requirements/bridge.txt"
_BRIDGE_PACKAGES = ("omegaconf", "einops")
_BEFORE_NORMS = ("linear_proj", "linear_fc2")
"""Layers with a norm of their outputs, in models with such norms."""
_MODEL = ("model",)


def check_lora(check: EngineCheck[MegatronEngineSpec]) -> None:
    engine, sizes, lora, tensor = check.engine, check.sizes, check.engine.lora, check.engine.parallel.tp
    if lora is None:
        return
    if not has_bridge():
        message = f"the adapters are megatron-bridge's, which is not installed; install it with `{BRIDGE_INSTALL}`"
        report(check, "lora", message)
    if lora.rank % tensor:
        message = f"{tensor} tensor-parallel ranks cannot share {lora.rank}; choose a multiple of {tensor}"
        report(check, "lora.rank", message, "parallel")
    if sizes.mixture and engine.parallel.etp > 1:
        message = "megatron-bridge's adapters of experts do not run on experts that several ranks share; set it to 1"
        report(check, "parallel.expert_tensor_parallel_size", message, "lora")
    if sizes.mixture and engine.transformer.get("moe_grouped_gemm") is False:
        message = removal("adapters of experts need them in one module")
        report(check, "transformer.moe_grouped_gemm", message, "lora")
    if not sizes.traits.has_tables and sizes.family is not None:
        message = f"models of type {sizes.family} have no adapters here; remove it, or choose a model of another type"
        report(check, "lora", message, _MODEL)
    if not lora.merge and sizes.mixture:
        report(check, "lora.merge", "adapters of experts are not sent alone; set it to true", _MODEL)
    chosen = None if lora.target_modules == "all-linear" else lora.target_modules
    normed = [name for name in _BEFORE_NORMS if chosen is None or name in chosen]
    if sizes.norms_outputs and normed:
        message = f"a norm follows on {normed[0]} in {sizes.family}, which its adapter would come after"
        remedy = "write `target_modules: [linear_qkv, linear_fc1]`"
        report(check, "lora.target_modules", f"{message}; {remedy}", _MODEL)
        return
    if lora.path is not None:
        _check_folder(check, lora)
    here, elsewhere = (PLAIN_LAYERS, LATENT_LAYERS)[:: -1 if sizes.latent_attention else 1]
    wrong = [name for name in chosen or () if name in elsewhere and name not in here]
    if wrong and sizes.family is not None:
        message = f"the model has no layer {wrong[0]}; choose from: {', '.join(here)}"
        report(check, "lora.target_modules", message, _MODEL)


def _check_folder(check: EngineCheck[MegatronEngineSpec], lora: LoraSpec) -> None:
    tensors = None
    try:
        if check.sizes.traits.has_tables:
            shape = model_shape(check.pipeline.model_of(check.name))
            tensors = list(model_tensors(shape, shape.vocabulary, check.engine.head))
    except (ValueError, KeyError, TypeError):
        pass  # Other rules report the model.
    for key, message in adapter_faults(lora, tensors):
        report(check, f"lora.{key}", message, _MODEL)


def has_bridge() -> bool:
    return is_installed() and all(importlib.util.find_spec(name) for name in _BRIDGE_PACKAGES)
