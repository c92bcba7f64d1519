"""Makes sure that the optimizer skips a step whose loss is not finite."""

from __future__ import annotations

import torch


def refusable(loss: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The scalar `loss`, with a non-finite gradient in the model's `output` if the loss is not finite.

    clamp(), maximum() and relu() have gradient 0 at NaN. Without this, a NaN in another model's log-probs would make
    the loss NaN while the optimizer applies the gradient of all other tokens. Does not wait for the device.
    """
    return torch.where(loss.isfinite(), loss, loss.detach() * output.sum())
