"""Requirements of Megatron's hybrid optimizer, which keeps its state and takes its step on the host.

Set by `optimizer.optimizer_cpu_offload`. Megatron checks these only in its command line, or fails much later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

DEFAULTS: dict[str, Any] = {"optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}
"""Defaults of further fields with the hybrid optimizer, as in Megatron's command line."""


def defaults_for(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Further defaults if `optimizer`, the section of the pipeline file, selects the hybrid optimizer."""
    return DEFAULTS if optimizer.get("optimizer_cpu_offload") is True else {}


def check_hybrid_fields(fields: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Raise ValueError with a line per field that the hybrid optimizer would fail with.

    `fields` include defaults; `dtype` is the weights'.
    """
    if not fields.get("optimizer_cpu_offload"):
        return
    needs = {
        "a GPU: without one all states are on the host; remove it": torch.cuda.is_available(),
        "weights in bfloat16: remove `transformer.bf16: false`": dtype == torch.bfloat16,
        "use_distributed_optimizer, whose parts of the weights it works on; take `false` out": fields[
            "use_distributed_optimizer"
        ],
        # Without it, the float32 weights would also stay on the GPU.
        "use_precision_aware_optimizer, which leaves the float32 weights to it; take `false` out": fields[
            "use_precision_aware_optimizer"
        ],
        "Adam: take out `optimizer`": fields.get("optimizer", "adam") == "adam",
        "decoupled_weight_decay, as torch's AdamW on the host has it; take `false` out": fields.get(
            "decoupled_weight_decay", True
        ),
    }
    missing = [f"optimizer.optimizer_cpu_offload: needs {need}" for need, met in needs.items() if not met]
    if missing:
        raise ValueError("\n".join(missing))
