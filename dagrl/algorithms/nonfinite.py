"""A loss that is not finite must not be trained on: the optimizer refuses a step whose gradient is not finite."""

from __future__ import annotations

import torch


def refusable(loss: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The scalar `loss`, with a gradient in the model's `output` that is not finite where the loss is not.

    The gradients of clamp(), maximum() and relu() are 0 where a value is NaN. So without this, a NaN among the
    log-probs of another model makes the loss NaN, while the optimizer applies the gradient of all other tokens. Nothing
    here waits for the device.
    """
    return torch.where(loss.isfinite(), loss, loss.detach() * output.sum())
