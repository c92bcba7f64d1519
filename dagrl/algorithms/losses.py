"""Policy losses per token; the caller weights and sums them.

In all of them r = exp(logprob - old) is the ratio of a token's new to its old probability, tensors have shape [T], and
only `logprob` has a gradient.

Losses and gradients are finite for finite log-probs: r is at most e**20, and a token beyond that has no gradient
through r, as in verl. NaN log-probs give NaN losses: see `refusable`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dagrl.algorithms.kl import LARGEST_LOG, k3
from dagrl.algorithms.rows import RowReducer

_LARGEST_LOG_OF_GSPO = 10.0
"""Upper bound of the mean log-ratio of a response in `gspo`, as in verl and siiRL."""
_STEEPEST_DRIFT = 2.0
"""Upper bound of the gradient of CPGD's drift with respect to the log-prob: siiRL's bound of r - 1."""


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """Tokens of a policy loss; only `logprob` has a gradient."""

    logprob: torch.Tensor
    old_logprob: torch.Tensor
    advantage: torch.Tensor

    @property
    def log_ratio(self) -> torch.Tensor:
        return self.logprob - self.old_logprob

    @property
    def ratio(self) -> torch.Tensor:
        return ratio_of(self.log_ratio)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy loss and tensors to report, all of the log-probs' shape."""

    loss: torch.Tensor
    """To be minimised, with gradient."""
    ratio: torch.Tensor
    """Ratio of new to old probability of a token (with `gspo`, `gmpo` and `topr`, of its response), detached."""
    clipped: torch.Tensor
    """Tokens without gradient because of a clip or, with `cispo` and `topr`, with a reduced weight; bool."""


def ppo_clip(tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> PolicyLoss:
    """PPO's clipped surrogate, negated: max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A).

    arXiv 1707.06347, eq. 7, which uses one epsilon for both bounds; a separate upper bound is Clip-Higher of DAPO
    (arXiv 2503.14476, section 3.1). `dual_clip` c bounds the loss by -c A where A < 0, where it is otherwise unbounded
    as the ratio grows (dual-clip PPO, arXiv 1912.09729).
    """
    ratio = tokens.ratio
    loss, clipped = _pessimistic(ratio, ratio.clamp(1 - clip_low, 1 + clip_high), tokens.advantage)
    if dual_clip is not None:
        ceiling = -dual_clip * tokens.advantage
        capped = (tokens.advantage < 0) & (loss > ceiling)
        loss = torch.where(capped, ceiling, loss)
        clipped = clipped | capped
    return PolicyLoss(loss, ratio.detach(), clipped)


def clip_cov(clipping: PolicyLoss, clip_cov_mask: torch.Tensor) -> PolicyLoss:
    """PPO's clipped loss, without gradient for tokens with 1 in `clip_cov_mask` [T].

    Clip-Cov (arXiv 2505.22617); `dagrl.algorithms.covariance.drawn` selects the tokens. `clipping` is from `ppo_clip`.
    """
    held = clip_cov_mask > 0
    return PolicyLoss(torch.where(held, 0.0, clipping.loss), clipping.ratio, clipping.clipped | held)


def kl_cov(tokens: PolicyTokens, *, clip_cov_mask: torch.Tensor, kl_coef: float) -> PolicyLoss:
    """The unclipped surrogate -r A, plus kl_coef abs(log r) for tokens with 1 in `clip_cov_mask` [T].

    KL-Cov (arXiv 2505.22617); `dagrl.algorithms.covariance.highest` selects the tokens. The paper's penalty is
    KL(old || policy), which the authors' code estimates by abs(log r).
    """
    log_ratio = tokens.log_ratio
    ratio = ratio_of(log_ratio)
    loss = -ratio * tokens.advantage + torch.where(clip_cov_mask > 0, kl_coef * log_ratio.abs(), 0.0)
    return _unclipped(loss, ratio)


def gspo(tokens: PolicyTokens, *, rows: RowReducer, clip_low: float, clip_high: float) -> PolicyLoss:
    """Group sequence policy optimization: PPO's clip on the ratio of whole responses, s = exp(mean of log r).

    arXiv 2507.18071, in the form of eq. 13 and 14, GSPO-token: max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A),
    where each token has the value of s and the gradient of its own log-prob. If the tokens of a response share one
    advantage and are averaged (``seq-mean-token-mean``), value and gradient are those of eq. 5. The paper's bounds are
    about 1e-4, because the geometric mean over a response changes little. s is at most e**10, and tokens beyond it have
    no gradient, as in verl: otherwise the loss is unbounded where A < 0.

    The responses in `rows` must be complete; inactive tokens do not count in the mean.
    """
    ratio, surrogate, beyond = _of_response(tokens.logprob, tokens.log_ratio, rows, _LARGEST_LOG_OF_GSPO)
    loss, clipped = _pessimistic(surrogate, surrogate.clamp(1 - clip_low, 1 + clip_high), tokens.advantage)
    return PolicyLoss(loss, ratio, clipped | beyond)


def gmpo(tokens: PolicyTokens, *, rows: RowReducer, clip_low: float, clip_high: float) -> PolicyLoss:
    """Geometric-mean policy optimization: -A times the geometric mean of a response's clipped ratios.

    arXiv 2507.20673: like GSPO's ratio, but each token is clipped before the mean, only in the direction of the
    advantage, to between exp(-clip_low) and exp(clip_high); the paper uses 0.4 for both. If the tokens of a response
    are averaged (``seq-mean-token-mean``) and share one advantage, value and gradient are those of the mean: each token
    has its value, and the gradient of its own log-prob unless it is clipped.

    Arguments are as in `gspo`, except that the bounds apply to the log of a token's ratio.
    """
    log_ratio = tokens.log_ratio
    bounded = log_ratio.clamp(-clip_low, clip_high)
    # The smaller of A log r and A times the bounded one, as in PPO's clip.
    clipped = torch.where(tokens.advantage >= 0, bounded < log_ratio, bounded > log_ratio)
    kept = torch.where(clipped, bounded, log_ratio)
    ratio, surrogate, beyond = _of_response(kept, kept, rows, LARGEST_LOG)
    return PolicyLoss(-tokens.advantage * surrogate, ratio, clipped | beyond)


def sapo(tokens: PolicyTokens, *, tau_pos: float, tau_neg: float) -> PolicyLoss:
    """Soft adaptive policy optimization: -4 / tau sigmoid(tau (r - 1)) A, a gate in place of PPO's clip.

    arXiv 2511.20347: near ratio 1 the gradient is that of the plain surrogate, and it fades as the ratio moves away.
    tau is `tau_pos` where A > 0 and `tau_neg` elsewhere, 1.0 and 1.05 in the paper, so that it fades faster for tokens
    made less likely. Nothing is clipped.
    """
    ratio = tokens.ratio
    tau = torch.full_like(ratio, tau_neg).masked_fill(tokens.advantage > 0, tau_pos)
    loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * tokens.advantage
    return _unclipped(loss, ratio)


def topr(tokens: PolicyTokens, *, rows: RowReducer) -> PolicyLoss:
    """Tapered off-policy REINFORCE: -A logprob, times the response's ratio (at most 1, detached) where A < 0.

    arXiv 2503.14286: good responses are imitated however unlikely they have become, bad ones lose their gradient as
    they become unlikely, so samples of older weights do no harm. `old_logprob` should be those of the sampler.
    """
    # Only ratios below 1 matter, and that of a long response may overflow any float.
    of_response = ratio_of(rows.sums(tokens.log_ratio.detach())).to(tokens.logprob.dtype)
    weight = torch.where(tokens.advantage < 0, of_response.clamp(max=1), 1.0)
    return PolicyLoss(
        -weight * tokens.advantage * tokens.logprob, of_response, (tokens.advantage < 0) & (of_response > 1)
    )


def cispo(tokens: PolicyTokens, *, clip_high: float) -> PolicyLoss:
    """Policy gradient with clipped importance weights: -min(r, 1 + clip_high) A logprob, with detached weights.

    CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): every token keeps its gradient. There is no lower bound, as in
    the paper's runs.
    """
    ratio = tokens.ratio.detach()
    return PolicyLoss(-ratio.clamp(max=1 + clip_high) * tokens.advantage * tokens.logprob, ratio, ratio > 1 + clip_high)


def cpgd(tokens: PolicyTokens, *, clip_low: float, clip_high: float, drift_coef: float) -> PolicyLoss:
    """Clipped policy gradient with policy drift: max(-log r A, -clip(log r, ...) A) + drift_coef KL(old || policy).

    arXiv 2505.12504: log r is clipped to [log(1 - clip_low), log(1 + clip_high)], so the same tokens as in PPO have no
    gradient, but the gradient is not multiplied by the ratio. The drift is estimated by k3; its gradient, (r - 1) times
    that of the log-prob, is that of the divergence, because the tokens come from the old policy. That factor is at most
    2, as in siiRL's code: beyond r = 3 the drift is linear.
    """
    log_ratio = tokens.log_ratio
    bounded = log_ratio.clamp(math.log(1 - clip_low), math.log(1 + clip_high))
    loss, clipped = _pessimistic(log_ratio, bounded, tokens.advantage)
    if drift_coef:
        near = log_ratio.clamp(max=math.log(1 + _STEEPEST_DRIFT))
        loss = loss + drift_coef * (k3(-near) + _STEEPEST_DRIFT * (log_ratio - near))
    return PolicyLoss(loss, ratio_of(log_ratio.detach()), clipped)


def reinforce(tokens: PolicyTokens) -> PolicyLoss:
    """The plain policy gradient: -A logprob (Williams 1992). Old log-probs are used for metrics only.

    Correct for samples of the policy being trained: one optimizer step per batch.
    """
    return _unclipped(-tokens.advantage * tokens.logprob, tokens.ratio)


def opmd(tokens: PolicyTokens, *, tau: float) -> PolicyLoss:
    """The damped policy gradient: -A logprob / (1 + tau). Old log-probs are used for metrics only.

    Online policy mirror descent in Trinity-RFT's simple form (arXiv 2505.17826), also for samples of older weights; the
    advantage is a deviation from the group's mean.
    """
    return _unclipped(-tokens.advantage * tokens.logprob / (1 + tau), tokens.ratio)


def opmd_kimi(tokens: PolicyTokens, *, rows: RowReducer, tau: float) -> PolicyLoss:
    """Mirror descent of Kimi k1.5 (arXiv 2501.12599, section 2.3.2), with squared log-ratios of responses.

    For a response y the loss is -A log pi(y) + tau / 2 (log(pi(y) / pi_old(y)))**2: its gradient is that of the paper,
    A grad log pi(y) - tau / 2 grad (log(pi(y) / pi_old(y)))**2, negated. Up to a constant and a factor it is
    (r - b - tau log(pi / pi_old))**2, whose minimum is the target policy of mirror descent.

    The square of the response's sum D is distributed to its tokens as D times each token's term, so it is complete if
    the tokens of a response have equal weights, in any aggregation. The paper's is `seq-mean-token-sum`.
    """
    log_ratio = tokens.log_ratio
    of_response = rows.sums(log_ratio).to(log_ratio.dtype)
    loss = -tokens.advantage * tokens.logprob + tau / 2 * of_response * log_ratio
    return _unclipped(loss, ratio_of(log_ratio))


def opmd_pairwise(tokens: PolicyTokens, *, rows: RowReducer, group: torch.Tensor, tau: float) -> PolicyLoss:
    """Online policy mirror descent over pairs of responses: -(a - mean of a) logprob, with a detached weight.

    With a = A - tau log(pi(y) / pi_old(y)) for a response y, mirror descent's optimum has the same a for all responses
    to a prompt (see `opmd_kimi`), for any baseline of A: Trinity-RFT's pairwise form (arXiv 2505.17826) minimises the
    sum of (a_i - a_j)**2 over pairs. Over a group of K, divided by 2 tau K, its gradient is that of this loss.

    Arguments are as in `opmd_kimi`, plus `group`, the prompt of each token's response, integers [T]. Groups must be
    complete; responses without active tokens do not belong to their group.
    """
    log_ratio = tokens.log_ratio.detach()
    worth = rows.means(tokens.advantage) - tau * rows.sums(log_ratio)
    # Like torch.unique, which would wait for a GPU to return the number of prompts.
    prompt = torch.searchsorted(group.sort().values, group)
    totals = torch.zeros(2, len(prompt), dtype=worth.dtype, device=worth.device)
    of_responses = torch.where(rows.once, torch.stack([worth, torch.ones_like(worth)]), 0.0)
    total, count = totals.index_add(1, prompt, of_responses)
    weight = (worth - (total / count.clamp(min=1))[prompt]).to(tokens.logprob.dtype)
    return _unclipped(-weight * tokens.logprob, ratio_of(log_ratio))


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(`log_ratio`), at most e**20; no gradient beyond it, where that of a clipped infinity would be NaN."""
    return torch.exp(log_ratio.clamp(max=LARGEST_LOG))


def refusable(loss: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The scalar `loss`, with a non-finite gradient in the model's `output` if the loss is not finite.

    The optimizer then skips the step. clamp(), maximum() and relu() have gradient 0 at NaN: a NaN in another model's
    log-probs would make the loss NaN while the optimizer applies the gradient of all other tokens. Does not wait for
    the device.
    """
    return torch.where(loss.isfinite(), loss, loss.detach() * output.sum())


def _unclipped(loss: torch.Tensor, ratio: torch.Tensor) -> PolicyLoss:
    return PolicyLoss(loss, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


def _of_response(
    gradient: torch.Tensor, log_ratio: torch.Tensor, rows: RowReducer, largest: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The geometric mean of a response's ratios for each of its tokens, at most exp(`largest`).

    Returns it detached; with the gradient of each token's `gradient`; and the tokens of responses beyond the bound,
    which have no gradient.
    """
    log_mean = rows.means(log_ratio.detach())
    beyond = log_mean > largest
    ratio = torch.exp(log_mean.clamp(max=largest)).to(log_ratio.dtype)
    # Times 1, with the gradient of the token's log-prob.
    return ratio, ratio * torch.exp(torch.where(beyond, 0.0, gradient - gradient.detach())), beyond


def _pessimistic(
    free: torch.Tensor, bounded: torch.Tensor, advantage: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The larger of the losses of two surrogates, and where it is the bounded one's, whose gradient is 0."""
    free, bounded = -free * advantage, -bounded * advantage
    return torch.maximum(free, bounded), bounded > free
