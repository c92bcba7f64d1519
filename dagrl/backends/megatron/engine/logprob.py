"""Log-probs and entropies, with their gradient, from logits whose vocabulary is split over tensor-parallel ranks.

Apart from the logits and their gradient there are no tensors of size [tokens, vocabulary]; with `linear_token_logprobs`
none at all. `linear_loss` serves losses whose gradient is known in the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from dagrl.backends.megatron.engine.teacher_divergence import Teacher, divergence_slope
from dagrl.backends.megatron.engine.token_statistics import (
    AT_ONCE,
    Statistics,
    TokenScores,
    VocabColumns,
    compiled,
    linear_statistics,
    statistics,
)

_PAIRS = 2**24
"""Pairs of ids that are compared at a time: 64 MiB in float32."""


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    columns: VocabColumns,
    candidates: torch.Tensor | None = None,
    teacher: Teacher | None = None,
) -> TokenScores:
    """Log-prob of each target, and the entropy in nats of its distribution, softmax(logits / temperature).

    `logits` [T, width] are this rank's `columns` of the vocabulary, `targets` token ids, int64 [T], `candidates`
    further ones, int64 [T, k], or else a `teacher` gives the divergence. Returns float32 tensors (float64 for float64
    logits), the same on every rank of the group. Every rank is assumed to compute the same loss from it, so that the
    gradient needs no communication.
    """
    assert logits.shape[:1] == targets.shape, "one row of logits for each target"
    return TokenScores(*_OfLogits.apply(logits, targets, columns, candidates, teacher))


def linear_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    columns: VocabColumns,
    candidates: torch.Tensor | None = None,
    teacher: Teacher | None = None,
) -> TokenScores:
    """`token_logprobs` of ``hidden @ weight.T``, whose logits never exist whole.

    `hidden` is [T, hidden size], `weight` [width, hidden size] this rank's rows of the output layer. Logits are
    computed by chunk, and again in the backward pass. The gradient of `hidden` is this rank's part: the caller sums it
    over the columns' group.
    """
    return TokenScores(*_OfLinear.apply(hidden, weight, targets, columns, candidates, teacher))


class ScoresContext(Protocol):
    """Autograd's context of these functions, with attributes from the forward pass for the backward pass."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    columns: VocabColumns
    teacher: Teacher | None
    weight_dtype: torch.dtype

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: ScoresContext,
        logits: torch.Tensor,
        targets: torch.Tensor,
        columns: VocabColumns,
        candidates: torch.Tensor | None,
        teacher: Teacher | None,
    ) -> tuple[torch.Tensor | None, ...]:
        statistic = statistics(lambda part: logits[part], logits, targets, columns, candidates, teacher)
        ctx.save_for_backward(logits, targets, candidates, *Kept.of(statistic))
        ctx.columns, ctx.teacher = columns, teacher
        return tuple(statistic.scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: ScoresContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets, candidates, *kept = ctx.saved_tensors
        slopes = Slopes(targets, candidates, Kept(*kept), TokenScores(*grads), ctx.columns, ctx.teacher)
        grad = torch.empty_like(logits)
        for part in ctx.columns.chunks(len(logits)):
            slopes.write(grad[part], logits[part], part)
        return grad, None, None, None, None


class _OfLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: ScoresContext,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        columns: VocabColumns,
        candidates: torch.Tensor | None,
        teacher: Teacher | None,
    ) -> tuple[torch.Tensor | None, ...]:
        statistic = linear_statistics(hidden, weight, targets, columns, candidates, teacher)
        ctx.save_for_backward(hidden, weight, targets, candidates, *Kept.of(statistic))
        ctx.columns, ctx.teacher = columns, teacher
        return tuple(statistic.scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: ScoresContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, candidates, *kept = ctx.saved_tensors
        slopes = Slopes(targets, candidates, Kept(*kept), TokenScores(*grads), ctx.columns, ctx.teacher)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = WeightGradient(weight)
        for part in ctx.columns.chunks(len(hidden), at_once=AT_ONCE):
            logits = hidden[part] @ weight.t()
            slope = torch.empty_like(logits)
            slopes.write(slope, logits, part)
            torch.mm(slope, weight, out=grad_hidden[part])
            # None if the output layer is frozen, as with low-rank adapters.
            if ctx.needs_input_grad[1]:
                grad_weight.add(slope, hidden[part])
        of_weight = grad_weight.total.to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_hidden, of_weight, None, None, None, None


class Kept(NamedTuple):
    """The inputs of `Slopes` from the forward pass."""

    log_sum: torch.Tensor
    entropy: torch.Tensor | None
    teacher_log_sum: torch.Tensor | None
    shift: torch.Tensor | None
    """See `TeacherScores`."""

    @staticmethod
    def of(statistic: Statistics) -> Kept:
        taught = statistic.teacher
        of_teacher = (taught.log_sum, taught.shift) if taught else (None, None)
        return Kept(statistic.log_sum, statistic.scores.entropy, *of_teacher)


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


@dataclass(frozen=True, slots=True)
class Slopes:
    """The gradient of the logits, given the gradients of the scores."""

    targets: torch.Tensor
    candidates: torch.Tensor | None
    kept: Kept
    grads: TokenScores
    columns: VocabColumns
    teacher: Teacher | None = None

    def write(self, out: torch.Tensor, logits: torch.Tensor, part: slice) -> None:
        """Write the gradient of one chunk's logits, [tokens, width], into `out`, which may be `logits`."""
        count = self.columns.count
        out[:, count:] = 0
        written = out[:, :count]
        # One tensor, not two views of it: the compiler would copy those.
        logits = written if out is logits else logits[:, :count]
        grad, entries = self.grads.logprob[part], None
        taught: tuple[Any, ...] = ()
        if self.teacher is not None and self.kept.teacher_log_sum is not None and self.kept.shift is not None:
            assert self.candidates is None, "a loss has one divergence from a teacher"
            if self.grads.divergence is not None:
                given, kind = self.teacher.logits_of(part)[:, :count], self.teacher.kind
                of_tokens = self.kept.teacher_log_sum[part], self.kept.shift[part], self.grads.divergence[part]
                taught = given, *of_tokens, kind.alpha, kind.is_mixture
        if self.candidates is None or self.grads.candidates is None:
            is_here, column = self.columns.targets_here(self.targets[part])
            target = torch.where(is_here, column, -1).int()
        else:
            if count:
                entries = self._entries(logits, part)
            known = self.columns.known(self.candidates[part])
            grad = grad + torch.where(known, self.grads.candidates[part], 0.0).sum(1)
            target = torch.full_like(self.targets[part], -1, dtype=torch.int32)
        compiled(_write_gradient)(
            written,
            logits,
            self.kept.log_sum[part],
            grad,
            target,
            None if self.kept.entropy is None else self.kept.entropy[part],
            None if self.kept.entropy is None or self.grads.entropy is None else self.grads.entropy[part],
            self.columns.of(part).divisor,
            *taught,
        )
        if entries is not None:
            written.scatter_(1, *entries)

    def _entries(self, logits: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of the target and of the candidates, and their gradient: d log p[i] / dx = onehot(i) - p, summed.

        Rounded once, as the two parts cancel where student and teacher agree. A token of another rank maps to column 0,
        whose gradient is right too. Ids may be equal.
        """
        assert self.candidates is not None and self.grads.candidates is not None
        ids = torch.cat([self.targets[part, None], self.candidates[part]], dim=1)
        grads = torch.cat([self.grads.logprob[part, None], self.grads.candidates[part]], dim=1)
        total = torch.where(self.columns.known(ids), grads, 0.0).sum(1, keepdim=True)
        are_here, column = self.columns.targets_here(ids)
        divisor = self.columns.of(part).divisor
        log_p = logits.gather(1, column).to(grads.dtype) / divisor - self.kept.log_sum[part, None]
        rows = max(1, _PAIRS // column.shape[1] ** 2)
        here = torch.where(are_here, grads, 0.0)
        own = torch.cat([_sums_of_equal(*some) for some in zip(column.split(rows), here.split(rows), strict=True)])
        if self.kept.entropy is not None and self.grads.entropy is not None:
            total = total + self.grads.entropy[part, None] * (log_p + self.kept.entropy[part, None])
        return column, ((own - log_p.exp() * total) / divisor).to(logits.dtype)


def _sums_of_equal(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sum of `values` over all places in the row with the same id, for each place; all [tokens, places]."""
    same = (ids[:, :, None] == ids[:, None, :]).to(values.dtype)
    return torch.bmm(same, values[:, :, None]).squeeze(2)


def _write_gradient(
    out: torch.Tensor,
    logits: torch.Tensor,
    log_sum: torch.Tensor,
    grad_logprob: torch.Tensor,
    target: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    temperature: float | torch.Tensor,
    teacher: torch.Tensor | None = None,
    teacher_log_sum: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    grad_divergence: torch.Tensor | None = None,
    alpha: float = 0.0,
    is_mixture: bool = False,
) -> None:
    """With d log p[t] / dx = onehot(t) - p  and  dH / dx = -p (log p + H), p = softmax(x), x = logits / temperature.

    `target` is the target's column, -1 where another rank has it, or where `Slopes` writes the columns of all ids;
    `grad_logprob` is then the sum over these. `divergence_slope` is that of the divergence from the `teacher`'s logits.
    """
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature - log_sum[:, None]
    slope = grad_logprob[:, None]
    if entropy is not None and grad_entropy is not None:
        slope = slope + grad_entropy[:, None] * (log_p + entropy[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)[None] == target[:, None]
    grad = torch.where(is_target, grad_logprob[:, None], 0.0) - log_p.exp() * slope
    if teacher is not None and teacher_log_sum is not None and shift is not None and grad_divergence is not None:
        log_q = teacher.to(log_p.dtype) / temperature - teacher_log_sum[:, None]
        of_teacher = grad_divergence[:, None] * divergence_slope(log_p, log_q, shift, alpha, is_mixture)
        # A row without a teacher has NaN in place of its hidden states.
        grad = grad + torch.where(grad_divergence[:, None] == 0, 0.0, of_teacher)
    out.copy_(grad / temperature)


SlopesOf = Callable[[slice, TokenScores], TokenScores]
"""Returns the gradient of the loss with respect to the scores of some tokens; float32."""

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
    teacher: Teacher | None = None,
) -> tuple[TokenScores, torch.Tensor]:
    """`linear_token_logprobs` without gradient, and a scalar 0 that has the gradient of the loss.

    Add the scalar to the loss, whose slopes `slopes_of` returns. The gradient of `hidden` is this rank's part: the
    caller sums it over the columns' group. Runs backward once.
    """
    *scores, carrier = _LinearLoss.apply(hidden, weight, targets, columns, slopes_of, candidates, teacher)
    return TokenScores(*scores), carrier


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: ScoresContext,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        columns: VocabColumns,
        slopes_of: SlopesOf,
        candidates: torch.Tensor | None,
        teacher: Teacher | None,
    ) -> tuple[torch.Tensor | None, ...]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprob = hidden.new_empty(len(hidden), dtype=wide)
        scores = TokenScores(
            logprob,
            torch.empty_like(logprob) if columns.with_entropy else None,
            None if candidates is None else logprob.new_empty(candidates.shape),
            None if teacher is None else torch.empty_like(logprob),
        )
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = WeightGradient(weight)
        for part in columns.chunks(len(hidden), at_once=_AT_ONCE):
            logits = hidden[part] @ weight.t()
            of_part, ids = columns.of(part), None if candidates is None else candidates[part]
            taught = None if teacher is None else teacher.of(part)
            own = statistics(logits.__getitem__, logits, targets[part], of_part, ids, taught)
            for whole, some in zip(scores, own.scores, strict=True):
                if whole is not None and some is not None:
                    whole[part] = some
            slopes = Slopes(targets[part], ids, Kept.of(own), slopes_of(part, own.scores), of_part, taught)
            for piece in columns.chunks(len(logits)):
                rows = logits[piece]
                slopes.write(rows, rows, piece)
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[part])
            if needs_weight:
                grad_weight.add(logits, hidden[part])
        ctx.save_for_backward(grad_hidden, grad_weight.total if needs_weight else None)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(*(score for score in scores if score is not None))
        return *scores, logprob.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: ScoresContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[-1]
        if grad_hidden is not None:
            grad_hidden.mul_(scale)
        if grad_weight is not None:
            # In one pass: the sum has the size of two output layers.
            grad_weight = torch.mul(grad_weight, scale, out=torch.empty_like(grad_weight, dtype=ctx.weight_dtype))
        return grad_hidden, grad_weight, None, None, None, None, None
