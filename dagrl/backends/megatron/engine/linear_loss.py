"""The gradient of the output layer in its forward pass, for losses that are sums over tokens.

If the loss of a token depends on its own scores alone, the gradient of a chunk's logits is known as soon
as the chunk is computed. So logits are computed once, by chunk, and overwritten by their gradient; the backward pass
only scales results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dagrl.backends.megatron.engine.logprob import Slopes, WeightGradient
from dagrl.backends.megatron.engine.token_statistics import TokenScores, VocabColumns, statistics

SlopesOf = Callable[[slice, TokenScores], TokenScores]
"""Given some of the tokens and their scores, the gradient of the loss with respect to these; float32."""

_AT_ONCE = 5
"""Chunks of logits in a product, 1.25 GiB in bfloat16: for each product the sum of the weight's gradient is read and
written, which with chunks of a third of that took a fifth of the time."""


def linear_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    columns: VocabColumns,
    slopes_of: SlopesOf,
    candidates: torch.Tensor | None = None,
) -> tuple[TokenScores, torch.Tensor]:
    """`linear_token_logprobs` without gradient, and a scalar 0 that has the gradient of the loss.

    Add the scalar to the loss: scaled by the gradient that it receives, the gradients of `hidden` and `weight` are
    those of the loss whose slopes `slopes_of` returns. The gradient of `hidden` is this rank's part: the caller sums it
    over the columns' group. Runs backward once.
    """
    *scores, carrier = _LinearLoss.apply(hidden, weight, targets, columns, slopes_of, candidates)
    return TokenScores(*scores), carrier


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        columns: VocabColumns,
        slopes_of: SlopesOf,
        candidates: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprob = hidden.new_empty(len(hidden), dtype=wide)
        scores = TokenScores(
            logprob,
            torch.empty_like(logprob) if columns.with_entropy else None,
            None if candidates is None else logprob.new_empty(candidates.shape),
        )
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = WeightGradient(weight)
        for part in columns.chunks(len(hidden), at_once=_AT_ONCE):
            logits = hidden[part] @ weight.t()
            of_part, ids = columns.of(part), None if candidates is None else candidates[part]
            found = statistics(logits.__getitem__, logits, targets[part], of_part, ids)
            for whole, some in zip(scores, found.scores, strict=True):
                if whole is not None and some is not None:
                    whole[part] = some
            entropy, grads = found.scores.entropy, slopes_of(part, found.scores)
            slopes = Slopes(targets[part], ids, found.log_sum, entropy, grads, of_part)
            for piece in columns.chunks(len(logits)):
                rows = logits[piece]
                slopes.write(rows, rows, piece)
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[part])
            if needs_weight:
                grad_weight.add(logits, hidden[part])
        ctx.save_for_backward(grad_hidden, grad_weight.total if needs_weight else None)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(*(each for each in scores if each is not None))
        return *scores, logprob.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[-1]
        if grad_hidden is not None:
            grad_hidden.mul_(scale)
        if grad_weight is not None:
            # In one pass: the sum has the size of two output layers.
            grad_weight = torch.mul(grad_weight, scale, out=torch.empty_like(grad_weight, dtype=ctx.weight_dtype))
        return grad_hidden, grad_weight, None, None, None, None
