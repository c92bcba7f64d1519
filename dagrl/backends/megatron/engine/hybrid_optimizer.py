"""What Megatron's hybrid optimizer needs, which keeps its states on the host and takes its step there.

It is `optimizer.optimizer_cpu_offload` in a pipeline file. Megatron checks these things in its command line only, or
fails much later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

DEFAULTS: dict[str, Any] = {"optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}
"""Of further fields, where the hybrid optimizer is chosen; as Megatron's command line has them, or asks for them."""


def defaults_for(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """What else holds where `optimizer`, the section of the pipeline file, chooses the hybrid optimizer."""
    return DEFAULTS if optimizer.get("optimizer_cpu_offload") is True else {}


def refuse_what_the_host_cannot(fields: Mapping[str, Any], dtype: torch.dtype) -> None:
    """ValueError with a line for each of the optimizer's `fields` that the hybrid optimizer would fail with.

    `fields` are those given and defaults, `dtype` is of the weights.
    """
    if not fields.get("optimizer_cpu_offload"):
        return
    fraction = fields["optimizer_offload_fraction"]
    needs = {
        "a GPU: without one all states are on the host; take it out": torch.cuda.is_available(),
        "weights in bfloat16: leave out `transformer.bf16: false`": dtype == torch.bfloat16,
        "use_distributed_optimizer, whose parts of the weights it works on; take `false` out": fields[
            "use_distributed_optimizer"
        ],
        # Without it, the float32 weights would stay on the GPU as well.
        "use_precision_aware_optimizer, which leaves the float32 weights to it; take `false` out": fields[
            "use_precision_aware_optimizer"
        ],
        "Adam: take out `optimizer`": fields.get("optimizer", "adam") == "adam",
        "decoupled_weight_decay, as torch's AdamW on the host has it; take `false` out": fields.get(
            "decoupled_weight_decay", True
        ),
        f"optimizer_offload_fraction above 0 and up to 1, not {fraction}": 0 < fraction <= 1,
    }
    missing = [f"optimizer.optimizer_cpu_offload: needs {need}" for need, met in needs.items() if not met]
    if missing:
        raise ValueError("\n".join(missing))
