"""On-policy distillation: what a teacher prefers, as advantages, or as a term of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dagrl.algorithms.gae import gae_advantages
from dagrl.config.schema.nodes.distillation import AdvantageDistillationSpec, LossDistillationSpec
from dagrl.data.batch import Column

if TYPE_CHECKING:
    import torch

    from dagrl.algorithms.rows import RowReducer


def distilled_advantages(
    teacher: Column, student: Column, mask: Column, spec: AdvantageDistillationSpec, taught: np.ndarray | None = None
) -> tuple[Column, np.ndarray]:
    """The advantages that a teacher gives to a student's tokens, and how far the student is from it.

    With d_t = log p_teacher - log p_student of a sampled token, within +-`clamp`: coef times the sum over t' >= t of
    discount**(t' - t) d_t', over tokens in the mask. As advantages of the plain policy gradient, without a discount,
    their expected gradient is that of -KL(student || teacher) at each token ("On-policy distillation", Thinking
    Machines Lab 2025; MiniLLM, arXiv 2306.08543, eq. 2). With a discount a token is credited with what follows it.

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
    zeros = Column(np.zeros(len(trained)), mask.offsets)
    sums, _ = gae_advantages(Column(difference, mask.offsets), zeros, of_tokens, discount=spec.discount)
    return Column(np.float32(spec.coef) * sums.values, mask.offsets), apart


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
    # A teacher that has not read the row gives NaN, whose gradient 0 * NaN would not be 0.
    divergence = kl_estimate(logprob, torch.where(known, teacher, logprob.detach()), spec.divergence)
    if spec.clamp is not None:
        divergence = divergence.clamp(-spec.clamp, spec.clamp)
    return torch.where(known, divergence, 0.0), known
