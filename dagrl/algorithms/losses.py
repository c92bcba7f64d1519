"""Policy losses, token by token: the caller weighs and sums them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy loss, and what there is to report about it; all of the log-probs' shape."""

    loss: torch.Tensor
    """To be minimised, with gradient."""
    ratio: torch.Tensor
    """Probability of the token now over that before, detached."""
    clipped: torch.Tensor
    """Tokens that a clip cut off from the gradient, bool."""


def ppo_clip(
    logprob: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate, negated: max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprob - old).

    arXiv 1707.06347, eq. 7, where both bounds are one epsilon; an upper one of its own is Clip-Higher of DAPO
    (arXiv 2503.14476, section 3.1). `dual_clip` c bounds the loss by -c A where A < 0, for there nothing else bounds it
    as the ratio grows (dual-clip PPO, arXiv 1912.09729).

    All tensors have one shape; only `logprob` gets a gradient.
    """
    ratio = torch.exp(logprob - old_logprob)
    free = -ratio * advantage
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    clipped = bounded > free
    loss = torch.maximum(free, bounded)
    if dual_clip is not None:
        ceiling = -dual_clip * advantage
        capped = (advantage < 0) & (loss > ceiling)
        loss = torch.where(capped, ceiling, loss)
        clipped = clipped | capped
    return PolicyLoss(loss, ratio.detach(), clipped)
