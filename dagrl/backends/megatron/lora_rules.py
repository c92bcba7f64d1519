"""Rules of low-rank adapters: that the layout, the model and the environment suit them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dagrl.backends.backend import EngineCheck
from dagrl.backends.megatron.lora import LATENT_LAYERS, PLAIN_LAYERS
from dagrl.backends.megatron.section import MegatronEngineSpec

BRIDGE_INSTALL = "uv pip install --no-deps -r requirements/bridge.txt"
_BRIDGE_PACKAGES = ("omegaconf", "einops")
"""Further packages that megatron-bridge needs."""


def check_lora(check: EngineCheck[MegatronEngineSpec]) -> None:
    """Report adapters that cannot be built."""
    engine, place, findings, sizes = check.engine, (*check.place, "lora"), check.findings, check.sizes
    lora, parallel = engine.lora, engine.parallel
    if lora is None:
        return
    if not has_bridge():
        message = f"the adapters are megatron-bridge's, which is not installed; install it with `{BRIDGE_INSTALL}`"
        findings.error(place, message)
    tensor = parallel.tensor_model_parallel_size
    if lora.rank % tensor:
        message = f"{tensor} tensor-parallel ranks cannot share {lora.rank}; choose a multiple of {tensor}"
        findings.error((*place, "rank"), message, depends_on=[(*check.place, "parallel")])
    if sizes.mixture and parallel.expert_tensor_parallel_size > 1:
        message = "megatron-bridge's adapters of experts do not run on experts that several ranks share; set it to 1"
        findings.error((*check.place, "parallel", "expert_tensor_parallel_size"), message, depends_on=[place])
    if sizes.mixture and engine.transformer.get("moe_grouped_gemm") is False:
        message = "adapters of experts need them in one module; take it out"
        findings.error((*check.place, "transformer", "moe_grouped_gemm"), message, depends_on=[place])
    if engine.bridge == "megatron-bridge" and sizes.latent_attention:
        message = "does not merge the adapters of latent attention; set bridge: native"
        findings.error((*check.place, "bridge"), message, depends_on=[place, ("model",)])
    if not lora.merge and (sizes.mixture or engine.bridge != "native"):
        what = "adapters of experts" if sizes.mixture else "megatron-bridge's weights"
        message = f"{what} are not sent alone; set it to true"
        findings.error((*place, "merge"), message, depends_on=[(*check.place, "bridge"), ("model",)])
    if lora.target_modules == "all-linear" or sizes.family is None:
        return
    here, elsewhere = (PLAIN_LAYERS, LATENT_LAYERS)[:: -1 if sizes.latent_attention else 1]
    if wrong := [name for name in lora.target_modules if name in elsewhere and name not in here]:
        message = f"the model has no layer {wrong[0]}; choose from: {', '.join(here)}"
        findings.error((*place, "target_modules"), message, depends_on=[("model",)])


def has_bridge() -> bool:
    """Whether megatron-bridge can be imported."""
    # Not find_spec("megatron.bridge"), which would import the package around it.
    package = importlib.util.find_spec("megatron")
    locations = package.submodule_search_locations if package else None
    found = any((Path(location) / "bridge" / "__init__.py").is_file() for location in locations or ())
    return found and all(importlib.util.find_spec(name) for name in _BRIDGE_PACKAGES)
