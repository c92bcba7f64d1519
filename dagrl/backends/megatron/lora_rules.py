"""Rules of low-rank adapters: that the layout, the model and the environment suit them."""

from __future__ import annotations

import importlib.util

from dagrl.backends.backend import EngineCheck
from dagrl.backends.families.bridge_models import is_installed
from dagrl.backends.families.registry import model_shape
from dagrl.backends.families.tensors import model_tensors
from dagrl.backends.megatron.adapter_folder import adapter_faults
from dagrl.backends.megatron.lora import LATENT_LAYERS, PLAIN_LAYERS, LoraSpec
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.config.errors import removal

BRIDGE_INSTALL = "uv pip install --no-deps -r requirements/bridge.txt"
_BRIDGE_PACKAGES = ("omegaconf", "einops")
"""Further packages that megatron-bridge needs."""
_BEFORE_NORMS = ("linear_proj", "linear_fc2")
"""Layers with a norm of their outputs, in models that have such norms."""


def check_lora(check: EngineCheck[MegatronEngineSpec]) -> None:
    engine, place, findings, sizes = check.engine, (*check.place, "lora"), check.findings, check.sizes
    lora, parallel = engine.lora, engine.parallel
    if lora is None:
        return
    if not has_bridge():
        message = f"the adapters are megatron-bridge's, which is not installed; install it with `{BRIDGE_INSTALL}`"
        findings.error(place, message)
    tensor = parallel.tp
    if lora.rank % tensor:
        message = f"{tensor} tensor-parallel ranks cannot share {lora.rank}; choose a multiple of {tensor}"
        findings.error((*place, "rank"), message, depends_on=[(*check.place, "parallel")])
    if sizes.mixture and parallel.etp > 1:
        message = "megatron-bridge's adapters of experts do not run on experts that several ranks share; set it to 1"
        findings.error((*check.place, "parallel", "expert_tensor_parallel_size"), message, depends_on=[place])
    if sizes.mixture and engine.transformer.get("moe_grouped_gemm") is False:
        message = removal("adapters of experts need them in one module")
        findings.error((*check.place, "transformer", "moe_grouped_gemm"), message, depends_on=[place])
    if not sizes.traits.has_tables and sizes.family is not None:
        message = f"models of type {sizes.family} have no adapters here; remove it, or choose a model of another type"
        findings.error(place, message, depends_on=[("model",)])
    if not lora.merge and sizes.mixture:
        findings.error(
            (*place, "merge"), "adapters of experts are not sent alone; set it to true", depends_on=[("model",)]
        )
    normed = [name for name in _BEFORE_NORMS if lora.target_modules == "all-linear" or name in lora.target_modules]
    if sizes.norms_outputs and normed:
        message = f"a norm follows on {normed[0]} in {sizes.family}, which its adapter would come after"
        remedy = "write `target_modules: [linear_qkv, linear_fc1]`"
        findings.error((*place, "target_modules"), f"{message}; {remedy}", depends_on=[("model",)])
        return
    if lora.path is not None:
        _check_folder(check, lora)
    if lora.target_modules == "all-linear" or sizes.family is None:
        return
    here, elsewhere = (PLAIN_LAYERS, LATENT_LAYERS)[:: -1 if sizes.latent_attention else 1]
    if wrong := [name for name in lora.target_modules if name in elsewhere and name not in here]:
        message = f"the model has no layer {wrong[0]}; choose from: {', '.join(here)}"
        findings.error((*place, "target_modules"), message, depends_on=[("model",)])


def _check_folder(check: EngineCheck[MegatronEngineSpec], lora: LoraSpec) -> None:
    """Report a folder of adapters that are not those of the section and the model."""
    tensors = None
    try:
        if check.sizes.traits.has_tables:
            shape = model_shape(check.pipeline.model_of(check.name))
            tensors = list(model_tensors(shape, shape.vocabulary, check.engine.head))
    except (ValueError, KeyError, TypeError):
        pass  # Other rules report the model.
    for key, message in adapter_faults(lora, tensors):
        check.findings.error((*check.place, "lora", key), message, depends_on=[("model",)])


def has_bridge() -> bool:
    return is_installed() and all(importlib.util.find_spec(name) for name in _BRIDGE_PACKAGES)
