"""Routers with a bias, such as gpt-oss's.

Megatron gives the bias to Transformer Engine's matrix product. cuBLAS then reads it in the type of the logits, float32,
whatever its own: from a bfloat16 bias it takes other values, past its end.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def add_bias_apart(model: torch.nn.Module) -> None:
    """Let all routers of `model` that have a bias add it after the product."""
    for module in model.modules():
        if isinstance(module, TopKRouter) and module.bias is not None:
            if torch.cuda.is_available():
                # Megatron makes routers on the host, and moves them in the function that is replaced here.
                module.cuda()
            module.gating = partial(_logits, module)


def _logits(router: TopKRouter, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [..., experts] of hidden states [..., hidden size], in the router's ``moe_router_dtype``."""
    dtype = _DTYPES.get(router.config.moe_router_dtype or "", hidden.dtype)
    logits: torch.Tensor = router_gating_linear(hidden, router.weight, None, dtype)
    return logits + router.bias.to(dtype)
