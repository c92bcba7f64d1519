"""Corrections for samples whose log-probs differ between generator and trainer.

Both compute the same model with different kernels and precision, and a generator may have older weights. In all of
these r = exp(trainer - rollout). Tensors are [T], whole responses, without gradient.

Where the generator's log-prob is not finite, log r is NaN, which is outside all bounds: corrections drop such a token,
or its whole response if they compare responses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from dagrl.algorithms.kl import LARGEST_LOG, k3
from dagrl.algorithms.rows import RowReducer
from dagrl.config.schema import ImportanceLevel, RejectionCriterion, RolloutCorrectionSpec
from dagrl.data.batch import Batch
from dagrl.data.tally import tally


def mismatch_metrics(trainer: torch.Tensor, rollout: torch.Tensor, rows: RowReducer) -> dict[str, torch.Tensor]:
    """Tallies over active tokens; over responses for metrics of perplexities and sequences.

    `trainer` and `rollout` are log-probs of the same tokens [T], drawn by the generator. With r = exp(trainer -
    rollout):

    - ``logprob_diff``: the absolute difference; ``prob_diff``: that of the probabilities;
    - ``kl``, ``kl_k3``: KL(rollout || trainer) by k1 and k3; ``kl_reverse``: KL(trainer || rollout), as the mean of
      r log r - (r - 1), which is unbiased for samples of the generator and never negative;
    - ``ratio``: r, whose mean is 1 if both have the same support; ``chi2_token``: r**2 - 1, the variance of r;
      ``chi2_sequence``: the same of the product of r over a response;
    - ``rollout_ppl``, ``trainer_ppl``: exp(-mean log-prob) of a response; ``ppl_ratio``: the second over the first;
    - ``unknown_fraction``: tokens whose `rollout` is not finite. The other metrics exclude these tokens.
    """
    rollout, trainer = rollout.double(), trainer.double()
    unknown = ~rollout.isfinite()
    every, rows = rows.active, rows.among(~unknown)
    difference = trainer - rollout
    log_ratio = difference.clamp(-LARGEST_LOG, LARGEST_LOG)
    ratio = log_ratio.exp()
    of_tokens = {
        "mismatch/logprob_diff": difference.abs(),
        "mismatch/prob_diff": (trainer.exp() - rollout.exp()).abs(),
        "mismatch/kl": -difference,
        "mismatch/kl_k3": k3(-log_ratio),
        "mismatch/kl_reverse": ratio * log_ratio - torch.expm1(log_ratio),
        "mismatch/ratio": ratio,
        "mismatch/chi2_token": ratio.square() - 1,
    }
    of_responses = {
        "mismatch/rollout_ppl": _exp(-rows.means(rollout)),
        "mismatch/trainer_ppl": _exp(-rows.means(trainer)),
        "mismatch/ppl_ratio": _exp(-rows.means(difference)),
        "mismatch/chi2_sequence": _exp(rows.sums(difference)).square() - 1,
    }
    of_all = tally({"mismatch/unknown_fraction": unknown}, every)
    return of_all | tally(of_tokens, rows.active) | tally(of_responses, rows.once)


def _exp(log_value: torch.Tensor) -> torch.Tensor:
    return log_value.clamp(-LARGEST_LOG, LARGEST_LOG).exp()


_RATIOS = {"token": "token", "sequence": "seq_sum", "geometric": "seq_mean"}
"""Criteria on ratios -> reductions of log-ratios."""
_LEAST_PROBABILITY = 1e-8
"""Probabilities are at least this far from 0 and 1 in ``binary_kl``, as in AReaL."""


@dataclass(frozen=True, slots=True)
class Importance:
    """Importance weights of tokens; each [T]."""

    weight: torch.Tensor
    truncated: torch.Tensor
    """Tokens with a ratio above the upper bound, which is then the weight; bool."""
    masked: torch.Tensor
    """Tokens with a ratio outside both bounds, or unknown, and weight 0; bool."""


@dataclass(frozen=True, slots=True)
class Correction:
    """The corrections of a micro-batch; each [T], or None if not enabled."""

    importance: Importance | None = None
    rejected: torch.Tensor | None = None
    """Tokens excluded from the loss by a criterion; bool."""
    by_criterion: Mapping[RejectionCriterion, torch.Tensor] = field(default_factory=dict)
    """The excluded tokens by criterion, if there are several."""
    vetoed: torch.Tensor | None = None
    """Tokens of responses excluded from the loss because of a single token; bool."""

    def of_policy(self, loss: torch.Tensor) -> torch.Tensor:
        """The policy loss of tokens [T], weighted, and 0 for excluded tokens."""
        return self.of_all(loss if self.importance is None else self.importance.weight * loss)

    def of_all(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss of tokens [T], 0 for excluded tokens."""
        for out in (self.rejected, self.vetoed):
            loss = loss if out is None else torch.where(out, 0.0, loss)
        return loss


def log_ratio_of(trainer: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
    """Log-ratios [T], NaN where `rollout` is not finite."""
    return torch.where(rollout.isfinite(), trainer - rollout, torch.nan)


def importance_weights(
    log_ratio: torch.Tensor, rows: RowReducer, *, level: ImportanceLevel, upper: float, lower: float | None = None
) -> Importance:
    """Bounded importance weights, of tokens or of whole responses; `log_ratio` is log r.

    - ``token``: w = min(r, upper). Truncated importance sampling between a generator and a trainer: Yao et al. 2025,
      "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", https://fengyao.notion.site/off-policy-rl
      (truncation itself: Ionides 2008).
    - ``sequence``: the same of R = product of r over the response, which is the weight of each of its tokens. Unbiased
      except for the bound, with higher variance: Liu et al. 2025, "When Speed Kills Stability",
      https://richardli.xyz/rl-collapse.
    - with a `lower` bound, weights outside [lower, upper] are 0 instead: IcePop's calibration M(r) (Ling Team 2025,
      "Every Step Evolves", arXiv 2510.18855, with bounds 0.5 and 5 and ``token``), and with ``sequence`` masked
      importance sampling.
    """
    log_weight = log_ratio.double() if level == "token" else rows.sums(log_ratio)
    # Compared as logs, because the ratio of a response may overflow.
    above = log_weight > math.log(upper)
    weight = log_weight.clamp(-LARGEST_LOG, LARGEST_LOG).exp().clamp(max=upper)
    masked = log_weight.isnan()
    if lower is not None:
        masked = masked | above | (log_weight < math.log(lower))
    weight = torch.where(masked, 0.0, weight).to(log_ratio.dtype)
    return Importance(weight, above & ~masked, masked)


def rejected(
    trainer: torch.Tensor,
    rollout: torch.Tensor,
    rows: RowReducer,
    *,
    criterion: RejectionCriterion,
    upper: float,
    lower: float | None = None,
) -> torch.Tensor:
    """Tokens, or all tokens of responses, on which trainer and generator disagree too much; bool [T].

    By ratio, kept within `lower` (default: 1 / `upper`) and `upper`: ``token`` r of each token; ``sequence`` its
    product over the response; ``geometric`` its geometric mean, which does not grow with the length. By divergence,
    kept up to `upper`: the ``k2`` or ``k3`` estimate of KL(rollout || trainer) of each token (``token_k3``), or its
    sum, mean or largest over the response (``seq_sum_k3``, ``seq_mean_k3``, ``seq_max_k3``); likewise ``tv``, the
    difference of the token's two probabilities (prime-rl's ipo with 0.1, ROLL's filter by difference), and
    ``binary_kl``, the larger of the divergences, one way and the other, of the choice between the token and the rest
    (KPop of Ring-2.6, 2026; AReaL's metric of this name). Sources: "When Speed Kills
    Stability" (see `importance_weights`), part 3, and trust region masking, Li et al. 2025, arXiv 2512.23075. The names
    are verl's: `docs/mismatch.md` has the table.
    """
    known = torch.where(rollout.isfinite(), rollout, torch.nan).double()
    log_ratio = (trainer.double() - known).clamp(-LARGEST_LOG, LARGEST_LOG)
    if criterion in _RATIOS:
        statistic = _over(_RATIOS[criterion], log_ratio, rows)
        lower = 1 / upper if lower is None else lower
        within = (statistic <= math.log(upper)) & (statistic >= math.log(lower))
    else:
        (estimator,) = (name for name in _DIVERGENCES if criterion.endswith(f"_{name}"))
        divergence = _DIVERGENCES[estimator](log_ratio, trainer.double(), known)
        within = _over(criterion.removesuffix(f"_{estimator}"), divergence, rows) <= upper
    return ~within & rows.active


def _binary_kl(_: torch.Tensor, trainer: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
    a, b = (logprob.exp().clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY) for logprob in (trainer, rollout))
    # D(a, b) = a log(a / b) + (1 - a) log((1 - a) / (1 - b)); both ways share the two logs.
    chosen, rest = (a / b).log(), ((1 - a) / (1 - b)).log()
    return torch.maximum(a * chosen + (1 - a) * rest, -b * chosen - (1 - b) * rest)


_DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k2": lambda log_ratio, *_: log_ratio.square() / 2,
    "k3": lambda log_ratio, *_: k3(-log_ratio),
    "tv": lambda _, trainer, rollout: (trainer.exp() - rollout.exp()).abs(),
    "binary_kl": _binary_kl,
}
"""Divergences of tokens by log r and the log-probs of trainer and generator."""


def vetoed(log_ratio: torch.Tensor, rows: RowReducer, *, threshold: float) -> torch.Tensor:
    """All tokens of responses with a token whose r is below `threshold`; bool [T].

    The trainer would hardly ever sample such a token, so the tokens after it are not samples of its policy.
    """
    return ~(rows.largest(-log_ratio) <= -math.log(threshold)) & rows.active


def correct(
    spec: RolloutCorrectionSpec,
    trainer: torch.Tensor,
    rollout: torch.Tensor,
    rows: RowReducer,
    totals: tuple[float, ...] = (),
) -> Correction:
    """The corrections that `spec` enables. `trainer` and `rollout` are log-probs [T]; `totals`: see
    `importance_totals`.
    """
    importance = veto = None
    log_ratio = log_ratio_of(trainer, rollout)
    if spec.rollout_is is not None:
        importance = _importance(spec, log_ratio, rows)
        if spec.rollout_is_batch_normalize:
            total, count = totals
            # If all weights are 0, they stay 0.
            importance = replace(importance, weight=importance.weight * (count / total if total else 1.0))
    by_criterion = {
        rejection.criterion: rejected(
            trainer, rollout, rows, criterion=rejection.criterion, upper=rejection.upper, lower=rejection.lower
        )
        for rejection in spec.rejections
    }
    out = torch.stack([*by_criterion.values()]).any(0) if by_criterion else None
    if spec.rollout_token_veto_threshold is not None:
        veto = vetoed(log_ratio, rows, threshold=spec.rollout_token_veto_threshold)
    return Correction(importance, out, by_criterion if len(by_criterion) > 1 else {}, veto)


def importance_totals(spec: RolloutCorrectionSpec, batch: Batch) -> tuple[float, float]:
    """Sum and number of a batch's importance weights, of tokens or responses; summed over ranks they give the mean.

    `batch` holds ``old_logprob``, ``rollout_logprob`` and ``response_mask``.
    """
    mask = batch["response_mask"]
    row = np.repeat(np.arange(len(mask)), mask.lengths)
    rows = RowReducer(torch.from_numpy(row), torch.from_numpy(mask.values > 0))
    old, rollout = (torch.from_numpy(batch[name].values) for name in ("old_logprob", "rollout_logprob"))
    # Masked, because inactive tokens may hold any value, also infinity.
    log_ratio = torch.where(rows.active, log_ratio_of(old, rollout), 0.0)
    counted = rows.active if spec.rollout_is == "token" else rows.once
    weight = _importance(spec, log_ratio, rows).weight.double()
    return float((weight * counted).sum()), float(counted.sum())


def correction_metrics(correction: Correction, rows: RowReducer) -> dict[str, torch.Tensor]:
    """Metrics of the correction as tallies; `docs/mismatch.md` explains them."""
    of_tokens, of_responses = {}, {}
    if (importance := correction.importance) is not None:
        of_tokens["correction/weight"] = importance.weight
        of_tokens["correction/truncated_fraction"] = importance.truncated
        of_tokens["correction/masked_fraction"] = importance.masked
    if correction.rejected is not None:
        of_tokens["correction/rejected_fraction"] = correction.rejected
        for criterion, out in correction.by_criterion.items():
            of_tokens[f"correction/rejected_fraction/{criterion}"] = out
        of_responses["correction/rejected_responses"] = rows.sums(correction.rejected) > 0
    if correction.vetoed is not None:
        of_responses["correction/vetoed_responses"] = correction.vetoed
    return tally(of_tokens, rows.active) | tally(of_responses, rows.once)


def _importance(spec: RolloutCorrectionSpec, log_ratio: torch.Tensor, rows: RowReducer) -> Importance:
    assert spec.rollout_is is not None
    return importance_weights(
        log_ratio,
        rows,
        level=spec.rollout_is,
        upper=spec.rollout_is_threshold,
        lower=spec.rollout_is_threshold_lower,
    )


def _over(scope: str, values: torch.Tensor, rows: RowReducer) -> torch.Tensor:
    match scope:
        case "token":
            return values
        case "seq_sum":
            return rows.sums(values)
        case "seq_mean":
            return rows.means(values)
        case "seq_max":
            return rows.largest(values)
    raise AssertionError(f"no scope {scope!r}")
