"""Works around mixtures of experts whose sizes torch's grouped matrix product rejects."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALIGNED_BYTES = 16


def avoid_misaligned_grouped_mm(model: PreTrainedModel) -> None:
    """Let transformers loop over the experts of `model` if a row of their matrices is not a multiple of 16 bytes.

    transformers multiplies all experts at once with ``grouped_mm``, also on a CPU, which fails with "strides should be
    multiple of 16 bytes". Both ways compute the same.
    """
    experts = [parameter for parameter in model.parameters() if parameter.dim() == 3]
    if any(weights.shape[-1] * weights.element_size() % _ALIGNED_BYTES for weights in experts):
        model.set_experts_implementation("eager")
