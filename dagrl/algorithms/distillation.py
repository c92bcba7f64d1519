"""On-policy distillation: a teacher's log-probs as advantages, or as a term of the loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import numpy as np

from dagrl.algorithms.token_returns import gae_advantages
from dagrl.config.schema.nodes.distillation import AdvantageDistillationSpec, LossDistillationSpec
from dagrl.data.batch import Column

if TYPE_CHECKING:
    import torch

    from dagrl.algorithms.rows import RowReducer
    from dagrl.backends.base import ResponseTokens
    from dagrl.config.schema.nodes.distillation import SampledDivergence


_NEVER = -1e4
"""Log-prob of a missing candidate, whose exponential is 0."""
_LEAST_REST = 1e-7
"""Lower bound of the probability of all tokens outside the candidates, as in SDPO."""
_LOG_OF_ZERO = -100.0
"""Log-prob under a teacher of tokens outside its candidates, as in NeMo-RL."""


def distilled_advantages(
    teacher: Column, student: Column, mask: Column, spec: AdvantageDistillationSpec, taught: np.ndarray | None = None
) -> tuple[Column, np.ndarray]:
    """Advantages of a student's tokens from a teacher's log-probs, and their differences.

    With d_t = log p_teacher - log p_student of a sampled token, within +-`clamp`: coef times the sum over t' >= t of
    discount**(t' - t) d_t', over tokens in the mask. As advantages of the plain policy gradient, without a discount,
    their expected gradient is the gradient of -KL(student || teacher) at each token ("On-policy distillation", Thinking
    Machines Lab 2025; MiniLLM, arXiv 2306.08543, eq. 2). With a discount a token is also credited with later
    differences. With an `early_weight` g, d_t is first multiplied by 1 + g (sum over t' >= t of abs(d_t')) / (sum of
    all of them): IW-OPD of TRL.

    Log-probs and `mask` are ragged alike; rows with 0 in `taught`, [S], have no teacher. Returns float32, ragged as
    `mask` and 0 outside it, and -d of all trained tokens with a teacher, float64. Raises ValueError if a log-prob of
    these is not finite.
    """
    trained = mask.values > 0
    if taught is not None:
        trained = trained & np.repeat(taught > 0, mask.lengths)
    of_tokens = Column(trained.astype(np.float32), mask.offsets)
    difference = np.zeros(len(trained))
    difference[trained] = teacher.values[trained].astype(np.float64) - student.values[trained]
    if not np.isfinite(difference).all():
        wrong = np.flatnonzero(~np.isfinite(difference))[0]
        raise ValueError(
            f"a token's log-prob is {teacher.values[wrong]:g} under the teacher and {student.values[wrong]:g} under "
            "the student; a row without a teacher needs 0 in `teacher_mask`, otherwise look for weights that are not "
            "finite"
        )
    apart = -difference[trained]
    if spec.clamp is not None:
        difference = difference.clip(-spec.clamp, spec.clamp)
    if spec.early_weight:
        difference = difference * (1 + spec.early_weight * _still_to_come(np.abs(difference), mask))
    zeros = Column(np.zeros(len(trained)), mask.offsets)
    sums, _ = gae_advantages(Column(difference, mask.offsets), zeros, of_tokens, discount=spec.discount)
    return Column(np.float32(spec.coef) * sums.values, mask.offsets), apart


def _still_to_come(size: np.ndarray, mask: Column) -> np.ndarray:
    """Share of the row's sum of `size` in each token and the tokens after it; float64."""
    import torch

    from dagrl.algorithms.rows import RowReducer

    row = torch.from_numpy(np.repeat(np.arange(len(mask)), mask.lengths))
    rows, sizes = RowReducer(row, torch.ones_like(row, dtype=torch.bool)), torch.from_numpy(size)
    return (rows.suffix_sums(sizes) / rows.sums(sizes).clamp(min=1e-8)).numpy()


def distillation_loss(
    spec: LossDistillationSpec,
    logprob: torch.Tensor,
    teacher: torch.Tensor,
    taught: torch.Tensor | None,
    row: RowReducer,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergence of each token from the teacher, [T], and the tokens that have one, bool [T].

    By `dagrl.algorithms.kl.kl_estimate`, within +-`clamp`, 0 elsewhere. `logprob` and `teacher` are log-probs of the
    sampled tokens, [T]; only the first has a gradient. Rows with 0 in `taught`, [S], have no teacher.
    """
    import torch

    from dagrl.algorithms.kl import kl_estimate

    known = row.active if taught is None else row.active & (taught > 0)[row.row]
    estimator = cast("SampledDivergence", spec.divergence)
    # Some estimators have the gradient 0 at NaN, and the engine refuses steps by their gradient.
    logprob = logprob * torch.where(known & teacher.isnan(), math.nan, 1.0)
    # A row without the teacher is NaN, and the gradient 0 * NaN would not be 0.
    divergence = kl_estimate(logprob, torch.where(known, teacher, logprob.detach()), estimator)
    if spec.clamp is not None:
        divergence = divergence.clamp(-spec.clamp, spec.clamp)
    return torch.where(known, divergence, 0.0), known


def candidate_loss(
    spec: LossDistillationSpec, tokens: ResponseTokens, row: RowReducer
) -> tuple[torch.Tensor, torch.Tensor]:
    """`candidate_divergence` of each token from the teacher, [T], and the tokens that have one, bool [T].

    It is within +-`clamp`, and 0 elsewhere. Log-probs of -inf mark missing candidates, such as ids of -1. A teacher's
    NaN makes the divergence NaN.
    """
    import torch

    student, teacher = tokens.candidate_logprob, tokens.columns["teacher_topk_logprob"]
    assert student is not None, "the engine gives log-probs at the objective's candidates"
    taught = tokens.columns.get("teacher_mask")
    known = row.active if taught is None else row.active & (taught > 0)[tokens.row]
    # NaN from weights or from rows without the teacher must not count as missing candidates.
    there = ((student != -math.inf) & (teacher != -math.inf) | teacher.isnan()) & known[:, None]
    divergence = candidate_divergence(spec, student, teacher.to(student.dtype), there, tokens.entropy)
    if spec.clamp is not None:
        divergence = divergence.clamp(-spec.clamp, spec.clamp)
    return torch.where(known, divergence, 0.0), known


def whole_loss(
    spec: LossDistillationSpec, tokens: ResponseTokens, row: RowReducer
) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's divergence of each token from the teacher, [T], and the tokens that have one, as `candidate_loss`.

    A teacher's NaN makes the divergence NaN.
    """
    import torch

    divergence, taught = tokens.divergence, tokens.columns.get("teacher_mask")
    assert divergence is not None, "the engine gives the objective's divergence"
    known = row.active if taught is None else row.active & (taught > 0)[tokens.row]
    if spec.clamp is not None:
        divergence = divergence.clamp(-spec.clamp, spec.clamp)
    return torch.where(known, divergence, 0.0), known


def candidate_divergence(
    spec: LossDistillationSpec,
    student: torch.Tensor,
    teacher: torch.Tensor,
    there: torch.Tensor,
    entropy: torch.Tensor | None = None,
) -> torch.Tensor:
    """Divergence [T] of two distributions with known log-probs at k tokens, [T, k]; with gradient.

    `there`, bool [T, k], marks the known ones; the others have probability 0. With p of the student and q of the
    teacher, over the candidates and, with ``outside: bucket``, one bucket of the rest:

    - ``forward_kl``: sum q (log q - log p);
    - ``reverse_kl``: sum p (log p - log q);
    - ``mixed_kl``: (1 - alpha) forward + alpha reverse (NeMo-RL, whose ``mixed_kl_weight`` is 1 - alpha);
    - ``jsd``: alpha KL(q || m) + (1 - alpha) KL(p || m), m = (1 - alpha) p + alpha q; at alpha 0 and 1 it is the
      forward and the reverse KL (GKD, arXiv 2306.13649, eq. 1; SDPO, arXiv 2601.20802).

    The rest has probability 1 - sum p, at least 1e-7. If all tokens are candidates, each is the exact divergence. By
    the data processing inequality, divergences with a bucket are never above it. ``outside: zero`` adds to the reverse
    KL the sum over other tokens of p (log p + 100), by the student's `entropy` [T] (NeMo-RL's ``zero_outside_topk``).
    """
    import torch

    if spec.min_logprob is not None:
        student, teacher = student.clamp(min=spec.min_logprob), teacher.clamp(min=spec.min_logprob)
    # Finite, so that nothing is 0 * inf.
    student, teacher = torch.where(there, student, _NEVER), torch.where(there, teacher, _NEVER)
    known = student
    match spec.outside:
        case "bucket":
            student, teacher = _with_rest(student), _with_rest(teacher)
        case "renormalize":
            student, teacher = student.log_softmax(1), teacher.log_softmax(1)
    alpha = spec.kl_share
    if spec.divergence == "jsd" and 0 < alpha < 1:
        mixture = torch.logaddexp(student + math.log1p(-alpha), teacher + math.log(alpha))
        return alpha * _kl(teacher, mixture) + (1 - alpha) * _kl(student, mixture)
    divergence = (1 - alpha) * _kl(teacher, student) + alpha * _kl(student, teacher)
    if spec.outside == "zero":
        assert entropy is not None, "the engine gives the entropy"
        p = known.exp()
        divergence = divergence + alpha * (-entropy - (p * known).sum(1) - _LOG_OF_ZERO * (1 - p.sum(1)))
    return divergence


def _kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.exp() * (first - second)).sum(1)


def _with_rest(logprob: torch.Tensor) -> torch.Tensor:
    """[T, k + 1]: also the log of the probability of all other tokens."""
    import torch

    known = logprob.logsumexp(1, keepdim=True).clamp(max=-_LEAST_REST)
    return torch.cat([logprob, torch.log(-torch.expm1(known))], dim=1)
