"""Works around mixtures of experts whose sizes torch's grouped matrix product rejects."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALIGNED_BYTES = 16


def avoid_misaligned_grouped_mm(model: PreTrainedModel) -> None:
    """Let transformers loop over the experts of `model` if rows of their matrices are not multiples of 16 bytes.

    Its ``grouped_mm`` of all experts at once fails for those, also on a CPU.
    """
    experts = [parameter for parameter in model.parameters() if parameter.dim() == 3]
    if any(weights.shape[-1] * weights.element_size() % _ALIGNED_BYTES for weights in experts):
        model.set_experts_implementation("eager")
