"""The policy objective: policy loss + KL to the reference - entropy, averaged over the global batch.

It implements `dagrl.backends.base.Objective`: engines call it for token weights, then for the loss of each micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dagrl.algorithms.aggregation import batch_parts, token_weights
from dagrl.algorithms.distillation import candidate_loss, distillation_loss, whole_loss
from dagrl.algorithms.kl import kl_clipped, kl_estimate, ratio_of
from dagrl.algorithms.losses import (
    PolicyLoss,
    PolicyTokens,
    cispo,
    clip_cov,
    cpgd,
    dppo_kl,
    dppo_tv,
    dro,
    kl_cov,
    m2po,
    opmd,
    ppo_clip,
    refusable,
    reinforce,
    sapo,
    without_policy,
)
from dagrl.algorithms.own_loss import OwnLoss
from dagrl.algorithms.response_losses import fipo, gmpo, gspo, off_policy, opmd_kimi, opmd_pairwise, topr, vespo
from dagrl.algorithms.rollout_correction import (
    Correction,
    correct,
    correction_metrics,
    importance_totals,
    mismatch_metrics,
)
from dagrl.algorithms.rows import RowReducer
from dagrl.config.columns import HIDDEN_STATES, LOGPROB_COLUMNS
from dagrl.config.schema import LossDistillationSpec, LossSpec, RolloutCorrectionSpec
from dagrl.data.batch import Batch, Column
from dagrl.data.tally import tally, tally_mean

if TYPE_CHECKING:
    from dagrl.backends.base import ResponseTokens


_FORMS: dict[str, Callable[..., PolicyLoss]] = {
    form.__name__: form
    for form in (
        ppo_clip,
        clip_cov,
        kl_cov,
        gspo,
        gmpo,
        fipo,
        dppo_tv,
        dppo_kl,
        m2po,
        sapo,
        cispo,
        cpgd,
        reinforce,
        topr,
        vespo,
        dro,
        opmd,
        opmd_kimi,
        opmd_pairwise,
    )
} | {"none": without_policy}
"""The losses of `LossSpec.policy`. Their arguments are `rows`, the bounds, options of `LossSpec` and columns."""
_COLUMNS = ("clip_cov_mask", "group_id")
"""Columns of some losses. With ``group_id``, engines keep groups in one micro-batch."""


@dataclass(frozen=True, slots=True)
class _Losses:
    """The parts of a loss; tensors [T]."""

    rows: RowReducer
    given: dict[str, torch.Tensor]
    """Log-probs by column, finite at inactive tokens."""
    trainer: torch.Tensor
    """The trainer's log-probs, to compare with the generator's."""
    rollout: torch.Tensor | None
    """The generator's log-probs; in `given` they are finite with a correction."""
    policy: PolicyLoss
    correction: Correction
    of_policy: torch.Tensor
    """The policy loss with its correction."""
    left_out: torch.Tensor | None
    """Tokens that the off-policy mask removes from the policy loss; bool."""
    divergence: torch.Tensor | None
    """Estimate of the KL divergence from the reference."""
    distillation: tuple[torch.Tensor, torch.Tensor] | None
    """Divergence from the teacher, and the tokens that have one."""


class PolicyObjective:
    """The loss described by `LossSpec`, as a function of response tokens.

    Each micro-batch contributes a weighted sum of token losses, with weights normalized over the global batch, so that
    loss and gradient do not depend on the micro-batches.
    """

    def __init__(
        self,
        loss: LossSpec,
        temperature: float,
        available: Collection[str],
        *,
        correction: RolloutCorrectionSpec | None = None,
        old_is_rollout: bool = False,
        needs_entropy: bool = True,
        longest_response: int | None = None,
        own: OwnLoss | None = None,
        sources: Sequence[str] = (),
    ) -> None:
        """`available`: columns that the pipeline writes. Optional ones are used if available:

        - ``old_logprob``: without it the tokens' current log-probs are used, which is exact while the weights have not
          changed since sampling, with one optimizer step per batch.
        - ``ref_logprob``: required if ``loss.kl_coef`` is above 0; else only for metrics.
        - ``rollout_logprob``: required by a `correction`; else only compared with the trainer's log-probs. These are
          the old ones or, with `old_is_rollout` (the generator's log-probs serve as the old ones), the current ones.

        Without `needs_entropy` the entropy is computed only if the loss needs it. `longest_response` is the largest
        number of tokens of a response, by which seq-mean-token-sum-norm divides. `own` is the user's loss named by
        ``loss.policy``. `sources` are prefixes of metrics by the number in the column ``source``.
        """
        assert "ref_logprob" in available or not loss.kl_coef, "kl_coef needs ref_logprob"
        teacher = loss.distillation.columns if loss.distillation else ()
        assert all(name in available for name in teacher), f"distillation needs {teacher}"
        assert "rollout_logprob" in available or not correction, "corrections need rollout_logprob"
        assert (own is not None) == (":" in loss.policy)
        assert longest_response or loss.weighting != "seq-mean-token-sum-norm"
        self.loss = loss
        self.correction = correction
        self.old_is_rollout = old_is_rollout
        self.longest_response = longest_response
        self.temperature = temperature
        of_rest = loss.distillation is not None and loss.distillation.outside == "zero"
        self.needs_entropy = needs_entropy or loss.entropy_coef > 0 or of_rest
        optional = tuple(
            name for name in ("old_logprob", "ref_logprob", "rollout_logprob", "trajectory_share") if name in available
        )
        self.own, self.sources = own, sources
        self._arguments = () if own else tuple(inspect.signature(_FORMS[loss.policy]).parameters)[1:]
        further = own.columns if own else tuple(name for name in self._arguments if name in _COLUMNS)
        advantage = () if loss.policy == "none" else ("advantage",)
        # The engine's output layer reads hidden states.
        shown = tuple(name for name in teacher if name != HIDDEN_STATES)
        taught = (*shown, *(("teacher_mask",) if teacher and "teacher_mask" in available else ()))
        numbers = ("source",) if sources else ()
        self.columns: tuple[str, ...] = tuple(dict.fromkeys((*advantage, *optional, *further, *taught, *numbers)))
        self.candidates = "teacher_topk_ids" if "teacher_topk_ids" in teacher else None
        self.whole_divergence = loss.distillation.whole_divergence if loss.distillation else None

    def token_weights(self, batch: Batch) -> tuple[Column, tuple[float, ...]]:
        """Weights from ``response_mask`` by ``LossSpec.aggregation``, see `aggregation`, and the normalizer's share.

        Tokens rejected by a correction count, because rejection is known only with the trainer's log-probs; the loss
        therefore does not depend on when these are computed. Further totals normalize importance weights.
        """
        shares = batch["trajectory_share"].values if "trajectory_share" in batch else None
        weights, normalizer = token_weights(batch["response_mask"], self.loss.weighting, self.longest_response, shares)
        totals: tuple[float, ...] = (normalizer,)
        if self.correction and self.correction.rollout_is_batch_normalize:
            totals += importance_totals(self.correction, batch)
        return weights, totals

    def __call__(self, tokens: ResponseTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The micro-batch's share of the loss, and metrics as tallies.

        ``loss/policy`` is the policy's part of the loss; the others are plain means over tokens with a weight above 0.
        ``kl/ref`` is KL(policy || reference) by the loss's estimator, ``kl/clip_fraction`` the fraction of tokens at
        its bound (of ``k3``), ``kl/old`` KL(old || policy) by k3, ``distillation/loss`` the divergence from the
        teacher. ``ratio/mean`` and ``ratio/clip_fraction`` are from `PolicyLoss`, ``ratio/off_policy_fraction`` is the
        fraction of `off_policy`, ``mismatch/...`` from `mismatch_metrics`, ``correction/...`` from
        `correction_metrics`.
        """
        losses = self._losses(tokens)
        rows, given, policy = losses.rows, losses.given, losses.policy
        metrics: dict[str, torch.Tensor] = {}
        if losses.rollout is not None:
            metrics |= mismatch_metrics(losses.trainer, losses.rollout, rows)
            if self.correction is not None:
                metrics |= correction_metrics(losses.correction, rows)
        share = tokens.columns.get("trajectory_share")
        parts = batch_parts(tokens.weight, rows, self.loss.weighting, self.longest_response, share)
        if self.loss.policy != "none":
            metrics["loss/policy"] = tally_mean(losses.of_policy, tokens.weight, parts)
        current = tokens.logprob.detach()
        of_tokens = {
            "ratio/mean": policy.ratio,
            "ratio/clip_fraction": policy.clipped,
            "kl/old": kl_estimate(given["old_logprob"], current, "k3"),
        }
        if losses.left_out is not None:
            of_tokens["ratio/off_policy_fraction"] = losses.left_out
        if losses.divergence is not None:
            of_tokens["kl/ref"] = losses.divergence
            if (estimator := self.loss.kl_estimator).startswith("k3"):
                clipped = kl_clipped(current, given["ref_logprob"], estimator, given["old_logprob"])
                of_tokens["kl/clip_fraction"] = clipped
        if losses.distillation is not None:
            metrics |= tally({"distillation/loss": losses.distillation[0]}, losses.distillation[1])
        if tokens.entropy is not None:
            of_tokens["entropy"] = tokens.entropy
            for number, prefix in enumerate(self.sources):
                here = rows.active & (tokens.columns["source"] == number)[tokens.row]
                metrics |= tally({f"{prefix}entropy": tokens.entropy}, here)
        return self._share(tokens, losses), metrics | tally(of_tokens, rows.active)

    def token_loss(self) -> Callable[[ResponseTokens], torch.Tensor] | None:
        if not self.loss.is_sum_over_tokens or (self.correction and not self.correction.is_of_tokens):
            return None
        return lambda tokens: self._share(tokens, self._losses(tokens))

    def _losses(self, tokens: ResponseTokens) -> _Losses:
        rows = RowReducer(tokens.row, tokens.weight > 0)
        current = tokens.logprob.detach()
        # Tokens of weight 0 must not reach exp(): 0 * inf would make the sum and its gradient NaN.
        given = {
            name: torch.where(rows.active, tokens.columns[name], current)
            for name in self.columns
            if name in LOGPROB_COLUMNS
        }
        old, rollout = given.setdefault("old_logprob", current), given.get("rollout_logprob")
        correction, divergence, left_out, distillation = Correction(), None, None, None
        trainer = current if self.old_is_rollout else old
        if self.correction is not None:
            assert rollout is not None
            correction = correct(self.correction, trainer, rollout, rows, tokens.totals[1:])
            # The loss of tokens that the correction drops must be finite: 0 * inf would make the gradient NaN.
            for name in ("rollout_logprob", *(("old_logprob",) if self.old_is_rollout else ())):
                given[name] = torch.where(rollout.isfinite(), given[name], current)
        policy = self.own(tokens, given, rows) if self.own else self._policy_loss(tokens, given["old_logprob"], rows)
        if "ref_logprob" in given:
            divergence = kl_estimate(tokens.logprob, given["ref_logprob"], self.loss.kl_estimator, given["old_logprob"])
        if self.loss.distillation is not None:
            distillation = self._distillation(self.loss.distillation, tokens, old, rows)
        weighed = correction.of_policy(policy.loss)
        if self.loss.off_policy_delta is not None:
            samples = PolicyTokens(current, given["old_logprob"], tokens.columns["advantage"])
            left_out = off_policy(samples, rows=rows, delta=self.loss.off_policy_delta)
            weighed = torch.where(left_out, 0.0, weighed)
        return _Losses(rows, given, trainer, rollout, policy, correction, weighed, left_out, divergence, distillation)

    @staticmethod
    def _distillation(
        spec: LossDistillationSpec, tokens: ResponseTokens, old: torch.Tensor, rows: RowReducer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if spec.over_vocabulary:
            divergence, known = whole_loss(spec, tokens, rows)
        elif spec.over_candidates:
            divergence, known = candidate_loss(spec, tokens, rows)
        else:
            teacher, taught = tokens.columns["teacher_logprob"], tokens.columns.get("teacher_mask")
            divergence, known = distillation_loss(spec, tokens.logprob, teacher, taught, rows)
        if spec.is_clip is not None:
            divergence = divergence * ratio_of((tokens.logprob - old).detach()).clamp(max=spec.is_clip)
        return divergence, known

    def _share(self, tokens: ResponseTokens, losses: _Losses) -> torch.Tensor:
        per_token = losses.of_policy
        if self.loss.kl_coef:
            assert losses.divergence is not None, "kl_coef needs ref_logprob"
            per_token = per_token + self.loss.kl_coef * losses.correction.of_all(losses.divergence)
        if losses.distillation is not None and self.loss.distillation is not None:
            per_token = per_token + self.loss.distillation.coef * losses.correction.of_all(losses.distillation[0])
        if tokens.entropy is not None and self.loss.entropy_coef:
            per_token = per_token - self.loss.entropy_coef * losses.correction.of_all(tokens.entropy)
        return refusable((tokens.weight * per_token).sum(), tokens.logprob)

    def _policy_loss(self, tokens: ResponseTokens, old: torch.Tensor, rows: RowReducer) -> PolicyLoss:
        spec = self.loss
        known: dict[str, object] = {
            "rows": rows,
            "clip_low": spec.clip_ratio,
            "clip_high": spec.clip_ratio if spec.clip_ratio_high is None else spec.clip_ratio_high,
        }
        for name in _COLUMNS:
            if name in self.columns:
                column = tokens.columns[name]
                known[name] = column[tokens.row] if name == "group_id" else column
        options = {name: known[name] if name in known else getattr(spec, name) for name in self._arguments}
        advantage = tokens.columns["advantage"] if "advantage" in self.columns else torch.zeros_like(old)
        given = PolicyTokens(tokens.logprob, old, advantage)
        return _FORMS[spec.policy](given, **options)
