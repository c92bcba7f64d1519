"""Log-probs and entropies out of logits whose vocabulary is split over tensor-parallel ranks.

`step` calls it on the logits that predict response tokens. The arithmetic is float32 whatever the logits' dtype, in
chunks of tokens: beside the logits and their gradient, nothing of the size [tokens, vocabulary] exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**26
"""Logits worked on at once: 256 MiB in float32."""


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob of each target, and the entropy in nats of what it was drawn from: softmax(logits / temperature).

    `logits` are this rank's columns of the vocabulary, [T, columns], equally many on each rank of `group` and in rank
    order; columns at or beyond `vocab_size`, counted over all ranks, are padding that no token has. `targets` are token
    ids, int64 [T]. `group` is None where the vocabulary is not split. `chunk_elements` logits are worked on at once.

    Returns two tensors [T], float32 (float64 for float64 logits); the entropy is None unless asked for. Every rank of
    the group gets the same. As everywhere in Megatron, each is taken to compute the same loss from it: then the
    gradient of a rank's logits needs no communication.
    """
    assert temperature > 0, "logits are divided by the temperature"
    assert logits.shape[:1] == targets.shape, "one row of logits for each target"
    logprob, entropy = _VocabParallelLogprob.apply(
        logits, targets, temperature, vocab_size, group, with_entropy, chunk_elements
    )
    return logprob, entropy


class _VocabParallelLogprob(torch.autograd.Function):
    """With x = logits / temperature and p = softmax(x): log p[target], and H = -sum p log p.

    d log p[t] / dx = onehot(t) - p  and  dH / dx = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
        chunk_elements: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        first = logits.shape[1] * (dist.get_rank(group) if group else 0)
        columns = min(max(vocab_size - first, 0), logits.shape[1])
        own = logits[:, :columns]
        is_here = (targets >= first) & (targets < first + columns)
        column = torch.where(is_here, targets - first, 0)

        highest = _row_max(own, temperature)
        _all_reduce(highest, dist.ReduceOp.MAX, group)
        # Rows: sum of exponentials, the target's shifted logit, sum of exponential times shifted logit.
        sums = highest.new_zeros(3 if with_entropy else 2, len(targets))
        for part in _chunks(own, chunk_elements):
            shifted = _scaled(own[part], temperature).sub_(highest[part, None])
            if columns:
                chosen = shifted.gather(1, column[part, None]).squeeze(1)
                sums[1, part] = torch.where(is_here[part], chosen, 0.0)
            exponential = shifted.exp()
            sums[0, part] = exponential.sum(1)
            if with_entropy:
                sums[2, part] = exponential.mul_(shifted).sum(1)
        _all_reduce(sums, dist.ReduceOp.SUM, group)

        log_sum = sums[0].log()
        entropy = log_sum - sums[2] / sums[0] if with_entropy else None
        ctx.save_for_backward(logits, column, is_here, highest, log_sum, entropy)
        ctx.temperature, ctx.columns, ctx.chunk_elements = temperature, columns, chunk_elements
        return sums[1] - log_sum, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        logits, column, is_here, highest, log_sum, entropy = ctx.saved_tensors
        temperature: float = ctx.temperature
        own = logits[:, : ctx.columns]
        grad = torch.empty_like(logits)
        grad[:, ctx.columns :] = 0
        for part in _chunks(own, ctx.chunk_elements):
            log_p = _scaled(own[part], temperature).sub_(highest[part, None]).sub_(log_sum[part, None])
            p = log_p.exp()
            slope = grad_logprob[part, None]
            if entropy is not None:
                assert grad_entropy is not None
                slope = log_p.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(slope)
            chunk = p.mul_(slope).neg_()
            if ctx.columns:
                at_target = torch.where(is_here[part], grad_logprob[part], 0.0)
                chunk.scatter_add_(1, column[part, None], at_target[:, None])
            grad[part, : own.shape[1]] = chunk.div_(temperature)
        return grad, None, None, None, None, None, None


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """A new tensor of logits / temperature, in float32 at least."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide, copy=True).div_(temperature)


def _row_max(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Largest of logits / temperature in each row; minus infinity on a rank whose columns are all padding."""
    if logits.shape[1] == 0:
        wide = torch.promote_types(logits.dtype, torch.float32)
        return logits.new_full(logits.shape[:1], -torch.inf, dtype=wide)
    return _scaled(logits.amax(1), temperature)


def _chunks(logits: torch.Tensor, chunk_elements: int) -> Iterator[slice]:
    rows = max(1, chunk_elements // max(1, logits.shape[1]))
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)


def _all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
