"""Log-probs and entropies from logits whose vocabulary is split over tensor-parallel ranks.

Computes in float32 for any dtype of logits, in chunks of tokens: apart from the logits and their gradient there are no
tensors of size [tokens, vocabulary]; with `linear_token_logprobs` none at all. `linear_loss` serves losses whose
gradient is known in the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**27
"""Logits processed at a time: 512 MiB in float32."""
_TILE = 128
"""Rows of a tile of matrix products."""
_AT_ONCE = 2
"""Chunks of logits in a product, if logits and their gradient are both held."""


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, columns: VocabColumns
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob of each target, and the entropy in nats of its distribution, softmax(logits / temperature).

    `logits` [T, width] are this rank's `columns` of the vocabulary, `targets` token ids, int64 [T].

    Returns two tensors [T], float32 (float64 for float64 logits), the same on every rank of the group; the entropy is
    None unless requested. As in Megatron, every rank is assumed to compute the same loss from it, so that the gradient
    of a rank's logits needs no communication.
    """
    assert logits.shape[:1] == targets.shape, "one row of logits for each target"
    logprob, entropy = _OfLogits.apply(logits, targets, columns)
    return logprob, entropy


def linear_token_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, columns: VocabColumns
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`token_logprobs` of ``hidden @ weight.T``, whose logits never exist whole.

    `hidden` is [T, hidden size], `weight` [width, hidden size] this rank's rows of the output layer. Logits are
    computed by chunk, and again in the backward pass. The gradient of `hidden` is this rank's part: the caller sums it
    over the columns' group.
    """
    logprob, entropy = _OfLinear.apply(hidden, weight, targets, columns)
    return logprob, entropy


@dataclass(frozen=True, slots=True)
class VocabColumns:
    """A rank's part of the vocabulary, and what is computed of it."""

    width: int
    """Columns of the rank, equally many on each rank of `group`, in rank order."""
    vocab_size: int
    """Tokens; columns from there on, counted over all ranks, are padding."""
    temperature: float | torch.Tensor
    """One for all tokens, or one for each [T]."""
    with_entropy: bool = False
    group: dist.ProcessGroup | None = None
    """Ranks that split the vocabulary; None for one."""
    chunk_elements: int = CHUNK_ELEMENTS
    """Logits processed at a time."""

    @property
    def first(self) -> int:
        return self.width * (dist.get_rank(self.group) if self.group else 0)

    @property
    def count(self) -> int:
        """Columns of tokens; the rank's further columns are padding."""
        return min(max(self.vocab_size - self.first, 0), self.width)

    def of(self, part: slice) -> VocabColumns:
        """The same for a part of the tokens."""
        if isinstance(self.temperature, torch.Tensor):
            return replace(self, temperature=self.temperature[part])
        return self

    @property
    def divisor(self) -> float | torch.Tensor:
        """The divisor of logits [T, width]."""
        return self.temperature[:, None] if isinstance(self.temperature, torch.Tensor) else self.temperature

    def chunks(self, rows: int, *, at_once: int = 1) -> Iterator[slice]:
        """Divide `rows` into parts of at most `at_once` times `chunk_elements`, and of a row at least.

        Parts of more than a tile have a power of two of rows: the tiles of a product with [width, hidden size] then
        occupy nearly all processors of a GPU, where other numbers of rows leave a part of them without work at the end.
        """
        each = max(1, at_once * self.chunk_elements // max(1, self.width))
        if each > _TILE:
            each = 1 << (each.bit_length() - 1)
        for start in range(0, rows, each):
            yield slice(start, min(start + each, rows))

    def targets_here(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each target is one of the rank's columns, and its index, or 0."""
        is_here = (targets >= self.first) & (targets < self.first + self.count)
        return is_here, torch.where(is_here, targets - self.first, 0)


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, columns: VocabColumns
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logprob, log_sum, entropy = statistics(lambda part: logits[part], logits, targets, columns)
        ctx.save_for_backward(logits, targets, log_sum, entropy)
        ctx.columns = columns
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        logits, targets, log_sum, entropy = ctx.saved_tensors
        slopes = Slopes(targets, log_sum, entropy, grad_logprob, grad_entropy, ctx.columns)
        grad = torch.empty_like(logits)
        for part in ctx.columns.chunks(len(logits)):
            slopes.write(grad[part], logits[part], part)
        return grad, None, None


class _OfLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, columns: VocabColumns
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logprob, log_sum, entropy = statistics(
            lambda part: hidden[part] @ weight.t(), hidden, targets, columns, at_once=_AT_ONCE
        )
        ctx.save_for_backward(hidden, weight, targets, log_sum, entropy)
        ctx.columns = columns
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, log_sum, entropy = ctx.saved_tensors
        slopes = Slopes(targets, log_sum, entropy, grad_logprob, grad_entropy, ctx.columns)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = WeightGradient(weight)
        for part in ctx.columns.chunks(len(hidden), at_once=_AT_ONCE):
            logits = hidden[part] @ weight.t()
            slope = torch.empty_like(logits)
            slopes.write(slope, logits, part)
            torch.mm(slope, weight, out=grad_hidden[part])
            # Not below low-rank adapters.
            if ctx.needs_input_grad[1]:
                grad_weight.add(slope, hidden[part])
        return grad_hidden, grad_weight.total.to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None


class WeightGradient:
    """The gradient of an output layer, summed over chunks in float32, because rounding each chunk would add up."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self._total: torch.Tensor | None = None

    @property
    def total(self) -> torch.Tensor:
        if self._total is None:
            return torch.zeros_like(self._weight, dtype=torch.promote_types(self._weight.dtype, torch.float32))
        return self._total

    def add(self, slope: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the part of some tokens: the gradient of their logits, [tokens, columns], and their hidden states.

        On a GPU products are neither rounded nor stored, and the first is written without reading zeros.
        """
        left, dtype = slope.t(), torch.promote_types(self._weight.dtype, torch.float32)
        if dtype == slope.dtype:
            self._total = left @ hidden if self._total is None else self._total.addmm_(left, hidden)
        elif not slope.is_cuda:
            self._total = self.total + left @ hidden
        elif self._total is None:
            self._total = torch.mm(left, hidden, out_dtype=dtype)
        else:
            torch.addmm(self._total, left, hidden, out_dtype=dtype, out=self._total)


def statistics(
    logits_of: Callable[[slice], torch.Tensor],
    like: torch.Tensor,
    targets: torch.Tensor,
    columns: VocabColumns,
    *,
    at_once: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Log-prob of the targets, log of the sum of exponentials, and entropy, all [T].

    With x = logits / temperature and p = softmax(x): log p[target] = x[target] - log sum exp(x), and
    H = log sum exp(x) - sum p x. Each rank shifts by its own maximum, so that one pass over the logits suffices;
    `_join` then combines the ranks.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    is_here, column = columns.targets_here(targets)
    highest = like.new_full((len(targets),), -torch.inf, dtype=wide)
    # Rows: sum of exponentials, the target's logit, sum of exponential times logit; all but the target's are shifted.
    sums = like.new_zeros(3 if columns.with_entropy else 2, len(targets), dtype=wide)
    sum_up = _compiled(_row_sums)
    for part in columns.chunks(len(targets) if columns.count else 0, at_once=at_once):
        logits = logits_of(part)[:, : columns.count]
        highest[part], sums[:, part] = sum_up(
            logits, column[part], is_here[part], columns.of(part).divisor, columns.with_entropy
        )
    highest, sums = _join(highest, sums, columns.group)
    log_sum = sums[0].log() + highest
    entropy = log_sum - sums[2] / sums[0] - highest if columns.with_entropy else None
    return sums[1] - log_sum, log_sum, entropy


def _join(
    highest: torch.Tensor, sums: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and sums over all ranks, from each rank's own, which are relative to its own maximum."""
    if group is None or dist.get_world_size(group) == 1:
        return highest, sums
    own = highest.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    # A rank with only padding has sums of 0 and a maximum of minus infinity.
    lower = torch.where(own.isinf(), 0.0, own - highest)
    factor = lower.exp()
    if len(sums) == 3:
        sums[2] = factor * (sums[2] + lower * sums[0])
    sums[0] *= factor
    dist.all_reduce(sums, group=group)
    return highest, sums


@dataclass(frozen=True, slots=True)
class Slopes:
    """The gradient of the logits, given those of log-probs and entropies, all [T]."""

    targets: torch.Tensor
    log_sum: torch.Tensor
    entropy: torch.Tensor | None
    grad_logprob: torch.Tensor
    grad_entropy: torch.Tensor | None
    columns: VocabColumns

    def write(self, out: torch.Tensor, logits: torch.Tensor, part: slice) -> None:
        """Write the gradient of one chunk's logits, [tokens, width], into `out`, which may be `logits`."""
        count = self.columns.count
        is_here, column = self.columns.targets_here(self.targets[part])
        out[:, count:] = 0
        written = out[:, :count]
        _compiled(_write_gradient)(
            written,
            # One tensor, not two views of it: the compiler would copy those.
            written if out is logits else logits[:, :count],
            self.log_sum[part],
            self.grad_logprob[part],
            torch.where(is_here, column, -1).int(),
            None if self.entropy is None else self.entropy[part],
            None if self.entropy is None or self.grad_entropy is None else self.grad_entropy[part],
            self.columns.of(part).divisor,
        )


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """On a GPU, compile to one kernel that reads the logits once; on a CPU, where that takes minutes, do not
    compile.
    """
    if not torch.cuda.is_available():
        return function
    compiled = torch.compile(function)

    def call(*args: Any) -> Any:
        # Dynamic in the number of rows only: dynamic columns would cost more than the arithmetic.
        for tensor in args:
            if isinstance(tensor, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*args)

    return call


def _row_sums(
    logits: torch.Tensor,
    column: torch.Tensor,
    is_here: torch.Tensor,
    temperature: float | torch.Tensor,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's highest x = logits / temperature, [tokens], and its sums, [2 or 3, tokens]; see `statistics`."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    highest = x.amax(1)
    shifted = x - highest[:, None]
    exponential = shifted.exp()
    sums = [exponential.sum(1), torch.where(is_here, x.gather(1, column[:, None]).squeeze(1), 0.0)]
    if with_entropy:
        sums.append((exponential * shifted).sum(1))
    return highest, torch.stack(sums)


def _write_gradient(
    out: torch.Tensor,
    logits: torch.Tensor,
    log_sum: torch.Tensor,
    grad_logprob: torch.Tensor,
    target: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    temperature: float | torch.Tensor,
) -> None:
    """With d log p[t] / dx = onehot(t) - p  and  dH / dx = -p (log p + H), p = softmax(x), x = logits / temperature.

    `target` is the target's column, -1 where another rank has it.
    """
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature - log_sum[:, None]
    slope = grad_logprob[:, None]
    if entropy is not None and grad_entropy is not None:
        slope = slope + grad_entropy[:, None] * (log_p + entropy[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)[None] == target[:, None]
    grad = torch.where(is_target, grad_logprob[:, None], 0.0) - log_p.exp() * slope
    out.copy_(grad / temperature)
