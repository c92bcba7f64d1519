"""Builds Hugging Face models on the device of a worker: float32 on a CPU, bfloat16 on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import AutoModel, PretrainedConfig, PreTrainedModel

_ALIGNED_BYTES = 16


def device_and_dtype() -> tuple[str, torch.dtype]:
    return ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def unset_model(kind: type[AutoModel], config: PretrainedConfig) -> PreTrainedModel:
    """A model without gradients whose weights will be replaced."""
    device, dtype = device_and_dtype()
    # Its own initialisation must not advance the process's random stream.
    with torch.random.fork_rng(), torch.device(device):
        model = kind.from_config(config, dtype=dtype)
    avoid_misaligned_grouped_mm(model)
    return model.eval().requires_grad_(False)


def avoid_misaligned_grouped_mm(model: PreTrainedModel) -> None:
    """Let transformers loop over the experts of `model` if rows of their matrices are not multiples of 16 bytes.

    Its ``grouped_mm`` of all experts at once fails for those, also on a CPU.
    """
    experts = [parameter for parameter in model.parameters() if parameter.dim() == 3]
    if any(weights.shape[-1] * weights.element_size() % _ALIGNED_BYTES for weights in experts):
        model.set_experts_implementation("eager")
