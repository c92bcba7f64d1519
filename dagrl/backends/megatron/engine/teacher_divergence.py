"""Divergences of whole distributions from those of a frozen teacher, whose vocabulary is split alike over
tensor-parallel ranks.

The teacher's logits are computed by chunk, from its last hidden states, so that no tensor of all tokens' distributions
exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dagrl.config.schema.nodes.distillation import WholeDivergence


@dataclass(frozen=True, slots=True)
class Teacher:
    """A teacher's distributions, softmax(logits / temperature), at the temperature of the student."""

    logits_of: Callable[[slice], torch.Tensor]
    """This rank's columns of the logits of some tokens, [tokens, width]; computed at each call."""
    kind: WholeDivergence

    def of(self, part: slice) -> Teacher:
        """The teacher of some tokens, with their logits computed once."""
        return Teacher(self.logits_of(part).__getitem__, self.kind)


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """The divergence of T tokens, and what its gradient needs; [T] each, the same on all ranks."""

    divergence: torch.Tensor
    log_sum: torch.Tensor
    """Log of the teacher's sum of exponentials."""
    shift: torch.Tensor
    """See `divergence_slope`."""

    @staticmethod
    def empty(like: torch.Tensor) -> TeacherScores:
        return TeacherScores(*(torch.zeros_like(like) for _ in range(3)))

    def write(self, part: slice, scores: TeacherScores) -> None:
        self.divergence[part], self.log_sum[part], self.shift[part] = scores.divergence, scores.log_sum, scores.shift


def divergence_scores(
    student: torch.Tensor,
    teacher: torch.Tensor,
    divisor: float | torch.Tensor,
    kind: WholeDivergence,
    group: dist.ProcessGroup | None,
    apply: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]],
) -> TeacherScores:
    """Divergences of tokens with the ranks' logits `student` and `teacher`, [tokens, columns], without padding.

    A rank may have no columns. `apply` compiles a function. Collective over `group`.
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    peaks = student.new_full((2, len(student)), -torch.inf, dtype=wide)
    sums, totals = torch.zeros_like(peaks), torch.zeros_like(peaks)
    several, has_columns = group is not None and dist.get_world_size(group) > 1, student.shape[1] > 0
    if has_columns:
        for row, logits in enumerate((student, teacher)):
            peaks[row], sums[row] = apply(_exponentials)(logits, divisor)
    if several:
        own = peaks.clone()
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=group)
        sums *= (own - peaks).exp()
        dist.all_reduce(sums, group=group)
    log_sums = peaks + sums.log()
    if has_columns:
        totals = apply(_totals)(student, teacher, *log_sums, divisor, kind.alpha, kind.is_mixture)
    if several:
        dist.all_reduce(totals, group=group)
    return TeacherScores(totals[0], log_sums[1], totals[1] - (0.0 if kind.is_mixture else 1 - kind.alpha))


def divergence_slope(
    log_p: torch.Tensor, log_q: torch.Tensor, shift: torch.Tensor, alpha: float, is_mixture: bool
) -> torch.Tensor:
    """Derivative of the divergence with respect to x of p = softmax(x), [tokens, columns].

    It is p (g - E_p[g]) for the part with p outside of the logarithm, where g is `_of_student`, and (1 - alpha) (p - q)
    for the forward divergence; `shift` is E_p[g], minus 1 - alpha with a forward part.
    """
    slope = log_p.exp() * (_of_student(log_p, log_q, alpha, is_mixture) - shift[:, None])
    return slope if is_mixture else slope - (1 - alpha) * log_q.exp()


def _exponentials(logits: torch.Tensor, divisor: float | torch.Tensor) -> torch.Tensor:
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) / divisor
    highest = x.amax(1)
    return torch.stack([highest, (x - highest[:, None]).exp().sum(1)])


def _totals(
    student: torch.Tensor,
    teacher: torch.Tensor,
    student_sum: torch.Tensor,
    teacher_sum: torch.Tensor,
    divisor: float | torch.Tensor,
    alpha: float,
    is_mixture: bool,
) -> torch.Tensor:
    """The divergence, and the sum of p g, over the rank's columns; [2, tokens]."""
    wide = torch.promote_types(student.dtype, torch.float32)
    log_p = student.to(wide) / divisor - student_sum[:, None]
    log_q = teacher.to(wide) / divisor - teacher_sum[:, None]
    mean = (log_p.exp() * _of_student(log_p, log_q, alpha, is_mixture)).sum(1)
    if is_mixture:
        forward = alpha * (log_q.exp() * (log_q - _mixed(log_p, log_q, alpha))).sum(1)
    else:
        forward = (1 - alpha) * (log_q.exp() * (log_q - log_p)).sum(1)
    return torch.stack([forward + mean, mean])


def _of_student(log_p: torch.Tensor, log_q: torch.Tensor, alpha: float, is_mixture: bool) -> torch.Tensor:
    """The factor g of p in the divergence."""
    if is_mixture:
        return (1 - alpha) * (log_p - _mixed(log_p, log_q, alpha))
    return alpha * (log_p - log_q)


def _mixed(log_p: torch.Tensor, log_q: torch.Tensor, alpha: float) -> torch.Tensor:
    return torch.logaddexp(log_p + math.log1p(-alpha), log_q + math.log(alpha))
