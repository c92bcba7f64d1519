"""Policy losses, token by token: the caller weighs and sums them.

In all of them r = exp(logprob - old) is a token's probability now over that before, tensors have one shape [T], and
only `logprob` gets a gradient.

Losses and gradients are finite for finite log-probs, however far apart: r is at most e**20, and a token has no gradient
through a larger r, as in verl. Log-probs that are NaN give losses that are NaN: see `refusable`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dagrl.algorithms.kl import k3
from dagrl.algorithms.rows import RowReducer

_LARGEST_LOG = 20.0
"""Logs of ratios are kept below this before exp(). Beyond, nothing depends on how far, and the gradient of an infinity
that is clipped is not a number."""
_LARGEST_LOG_OF_GSPO = 10.0
"""The bound on the mean of a response's log-ratios in `gspo`, as in verl and siiRL."""
_STEEPEST_DRIFT = 2.0
"""Largest gradient of CPGD's drift in the log-prob: siiRL's bound on r - 1."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy loss, and what there is to report about it; all of the log-probs' shape."""

    loss: torch.Tensor
    """To be minimised, with gradient."""
    ratio: torch.Tensor
    """Probability of the token (with `gspo`, `gmpo` and `topr`, of its response) now over that before, detached."""
    clipped: torch.Tensor
    """Tokens that a clip cut off from the gradient, or, with `cispo` and `topr`, whose weight it lowered; bool."""


def ppo_clip(
    logprob: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate, negated: max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A).

    arXiv 1707.06347, eq. 7, where both bounds are one epsilon; an upper one of its own is Clip-Higher of DAPO
    (arXiv 2503.14476, section 3.1). `dual_clip` c bounds the loss by -c A where A < 0, for there nothing else bounds it
    as the ratio grows (dual-clip PPO, arXiv 1912.09729).
    """
    ratio = ratio_of(logprob - old_logprob)
    loss, clipped = _pessimistic(-ratio * advantage, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    if dual_clip is not None:
        ceiling = -dual_clip * advantage
        capped = (advantage < 0) & (loss > ceiling)
        loss = torch.where(capped, ceiling, loss)
        clipped = clipped | capped
    return PolicyLoss(loss, ratio.detach(), clipped)


def clip_cov(clipping: PolicyLoss, clip_cov_mask: torch.Tensor) -> PolicyLoss:
    """PPO's clipped loss without the tokens at 1 in `clip_cov_mask` [T]: they have no gradient.

    Clip-Cov (arXiv 2505.22617); `dagrl.algorithms.covariance.drawn` says which. `clipping` is `ppo_clip`'s.
    """
    held = clip_cov_mask > 0
    return PolicyLoss(torch.where(held, 0.0, clipping.loss), clipping.ratio, clipping.clipped | held)


def kl_cov(
    logprob: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    *,
    clip_cov_mask: torch.Tensor,
    kl_coef: float,
) -> PolicyLoss:
    """The surrogate without any clip, -r A, and for tokens at 1 in `clip_cov_mask` [T] kl_coef abs(log r).

    KL-Cov (arXiv 2505.22617); `dagrl.algorithms.covariance.highest` says which. The paper's penalty is KL(old ||
    policy); abs(log r) is how the authors' code estimates it.
    """
    log_ratio = logprob - old_logprob
    ratio = ratio_of(log_ratio)
    loss = -ratio * advantage + torch.where(clip_cov_mask > 0, kl_coef * log_ratio.abs(), 0.0)
    return PolicyLoss(loss, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


def gspo(
    logprob: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    *,
    rows: RowReducer,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Group sequence policy optimization: PPO's clip on the ratio of whole responses, s = exp(mean of log r).

    arXiv 2507.18071, in the form of eq. 13 and 14, GSPO-token: max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A),
    where each token has the value of s and the gradient of its own log-prob. Where the tokens of a response have one
    advantage and are averaged (``seq-mean-token-mean``), that is eq. 5 in value and gradient. The paper's bounds are
    some 1e-4, for the geometric mean over a response hardly moves. s is at most e**10, and tokens have no gradient
    beyond that, as in verl: nothing else bounds the loss where A < 0.

    Args:
        logprob: [T].
        old_logprob: [T].
        advantage: [T].
        rows: the responses; all tokens of one must be here, and those that are not active do not count in the mean.
        clip_low: lower bound of s, below 1.
        clip_high: upper bound of s, above 1.

    """
    ratio, surrogate, beyond = _of_response(logprob, logprob - old_logprob, rows, _LARGEST_LOG_OF_GSPO)
    loss, clipped = _pessimistic(-surrogate * advantage, -surrogate.clamp(1 - clip_low, 1 + clip_high) * advantage)
    return PolicyLoss(loss, ratio, clipped | beyond)


def gmpo(
    logprob: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    *,
    rows: RowReducer,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Geometric-mean policy optimization: -A times the geometric mean of a response's clipped ratios.

    arXiv 2507.20673: as GSPO's ratio, but each token is clipped, before the mean is taken and in the direction of the
    advantage alone, to between exp(-clip_low) and exp(clip_high); 0.4 for both in the paper. Where tokens of a response
    are averaged (``seq-mean-token-mean``) and have one advantage, value and gradient are those of the mean: each token
    has the value of it, and the gradient of its own log-prob unless it is clipped.

    Arguments as of `gspo`, but for the bounds, which are of the log of a token's ratio.
    """
    log_ratio = logprob - old_logprob
    bounded = log_ratio.clamp(-clip_low, clip_high)
    # The smaller of A log r and A times the bounded one: what PPO's clip would leave of it.
    clipped = torch.where(advantage >= 0, bounded < log_ratio, bounded > log_ratio)
    kept = torch.where(clipped, bounded, log_ratio)
    ratio, surrogate, beyond = _of_response(kept, kept, rows, _LARGEST_LOG)
    return PolicyLoss(-advantage * surrogate, ratio, clipped | beyond)


def sapo(
    logprob: torch.Tensor, old_logprob: torch.Tensor, advantage: torch.Tensor, *, tau_pos: float, tau_neg: float
) -> PolicyLoss:
    """Soft adaptive policy optimization: -4 / tau sigmoid(tau (r - 1)) A, a gate in place of PPO's clip.

    arXiv 2511.20347: near ratio 1 it has the gradient of the plain surrogate, and the further the ratio moves the less;
    tau is `tau_pos` where A > 0 and `tau_neg` elsewhere, 1.0 and 1.05 in the paper, so that what is made less likely
    fades out sooner. Nothing is ever clipped.
    """
    ratio = ratio_of(logprob - old_logprob)
    tau = torch.full_like(ratio, tau_neg).masked_fill(advantage > 0, tau_pos)
    loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
    return PolicyLoss(loss, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


def topr(logprob: torch.Tensor, old_logprob: torch.Tensor, advantage: torch.Tensor, *, rows: RowReducer) -> PolicyLoss:
    """Tapered off-policy REINFORCE: -A logprob, and where A < 0 times the response's ratio, up to 1, without gradient.

    arXiv 2503.14286: what is good is imitated however unlikely it has become, what is bad is forgotten about as it
    becomes unlikely; so samples of older weights do no harm. `old_logprob` are meant to be those that sampled.
    """
    # Beyond 1 it does not matter, and the ratio of a long response may be too large for any float.
    of_response = ratio_of(rows.sums((logprob - old_logprob).detach())).to(logprob.dtype)
    weight = torch.where(advantage < 0, of_response.clamp(max=1), 1.0)
    return PolicyLoss(-weight * advantage * logprob, of_response, (advantage < 0) & (of_response > 1))


def cispo(logprob: torch.Tensor, old_logprob: torch.Tensor, advantage: torch.Tensor, *, clip_high: float) -> PolicyLoss:
    """Policy gradient with clipped importance weights: -min(r, 1 + clip_high) A logprob, the weight without gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): no token is cut off from the gradient. There is no lower bound,
    as in the paper's runs.
    """
    ratio = ratio_of(logprob - old_logprob).detach()
    return PolicyLoss(-ratio.clamp(max=1 + clip_high) * advantage * logprob, ratio, ratio > 1 + clip_high)


def cpgd(
    logprob: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    drift_coef: float,
) -> PolicyLoss:
    """Clipped policy gradient with policy drift: max(-log r A, -clip(log r, ...) A) + drift_coef KL(old || policy).

    arXiv 2505.12504: log r is kept within log(1 - clip_low) and log(1 + clip_high), so a token is left alone where
    PPO's clip would, but the gradient is not multiplied with the ratio. The drift is estimated by k3, whose gradient,
    (r - 1) times that of the log-prob, is that of the divergence, for the tokens come from the old policy. That
    factor is at most 2, as in siiRL's code: beyond r = 3 the drift continues as a straight line.
    """
    log_ratio = logprob - old_logprob
    bounded = log_ratio.clamp(math.log(1 - clip_low), math.log(1 + clip_high))
    loss, clipped = _pessimistic(-log_ratio * advantage, -bounded * advantage)
    if drift_coef:
        near = log_ratio.clamp(max=math.log(1 + _STEEPEST_DRIFT))
        loss = loss + drift_coef * (k3(-near) + _STEEPEST_DRIFT * (log_ratio - near))
    return PolicyLoss(loss, ratio_of(log_ratio.detach()), clipped)


def reinforce(logprob: torch.Tensor, old_logprob: torch.Tensor, advantage: torch.Tensor) -> PolicyLoss:
    """The plain policy gradient: -A logprob (Williams 1992). The old log-probs are only for the report.

    Right for the samples of the very policy that is trained: one optimizer step for each batch.
    """
    ratio = ratio_of(logprob - old_logprob).detach()
    return PolicyLoss(-advantage * logprob, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def opmd(logprob: torch.Tensor, old_logprob: torch.Tensor, advantage: torch.Tensor, *, tau: float) -> PolicyLoss:
    """The policy gradient, held back: -A logprob / (1 + tau); the old log-probs are only for the report.

    Online policy mirror descent in Trinity-RFT's simple form (arXiv 2505.17826), which is meant for samples of older
    weights too, the advantage being a deviation from the group's mean.
    """
    plain = reinforce(logprob, old_logprob, advantage)
    return PolicyLoss(plain.loss / (1 + tau), plain.ratio, plain.clipped)


def opmd_kimi(
    logprob: torch.Tensor, old_logprob: torch.Tensor, advantage: torch.Tensor, *, rows: RowReducer, tau: float
) -> PolicyLoss:
    """Online policy mirror descent of Kimi k1.5 (arXiv 2501.12599, section 2.3.2): squared log-ratios of responses.

    For a response y the loss is -A log pi(y) + tau / 2 (log(pi(y) / pi_old(y)))**2: its gradient is that of the paper,
    A grad log pi(y) - tau / 2 grad (log(pi(y) / pi_old(y)))**2, negated. Up to a constant and a factor that is
    (r - b - tau log(pi / pi_old))**2, whose least is the policy that mirror descent steps to.

    The square of the response's sum D is told to its tokens as D times each token's part of it: so it is whole where
    tokens of a response are weighted alike, whatever the aggregation. `seq-mean-token-sum` is the paper's.
    """
    log_ratio = logprob - old_logprob
    of_response = rows.sums(log_ratio).to(log_ratio.dtype)
    loss = -advantage * logprob + tau / 2 * of_response * log_ratio
    ratio = ratio_of(log_ratio.detach())
    return PolicyLoss(loss, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def opmd_pairwise(
    logprob: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    *,
    rows: RowReducer,
    group: torch.Tensor,
    tau: float,
) -> PolicyLoss:
    """Online policy mirror descent over pairs of responses: -(a - mean of a) logprob, the weight without gradient.

    With a = A - tau log(pi(y) / pi_old(y)) of a response y, mirror descent's optimum has the same a for all responses
    to a prompt (see `opmd_kimi`), whatever the baseline of A: Trinity-RFT's pairwise form (arXiv 2505.17826) minimises
    the sum of (a_i - a_j)**2 over pairs. Over a group of K, divided by 2 tau K, that has the gradient of this loss.

    Arguments as of `opmd_kimi`, and `group`, the prompt that each token's response answers, integers [T]: all responses
    of a group must be here. Those without a token that counts are no part of their group.
    """
    log_ratio = (logprob - old_logprob).detach()
    worth = rows.means(advantage) - tau * rows.sums(log_ratio)
    # A number for each prompt, as torch.unique would give, which waits for a GPU to say how many there are.
    prompt = torch.searchsorted(group.sort().values, group)
    totals = torch.zeros(2, len(prompt), dtype=worth.dtype, device=worth.device)
    of_responses = torch.where(rows.once, torch.stack([worth, torch.ones_like(worth)]), 0.0)
    total, count = totals.index_add(1, prompt, of_responses)
    weight = (worth - (total / count.clamp(min=1))[prompt]).to(logprob.dtype)
    ratio = ratio_of(log_ratio)
    return PolicyLoss(-weight * logprob, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(`log_ratio`), at most e**20; beyond, without gradient."""
    return torch.exp(log_ratio.clamp(max=_LARGEST_LOG))


def _of_response(
    gradient: torch.Tensor, log_ratio: torch.Tensor, rows: RowReducer, largest: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The geometric mean of a response's ratios, for each of its tokens and at most exp(`largest`).

    Returns it without gradient; with it, as if each token's were exp(`gradient`); and the tokens of responses beyond
    the bound, which get no gradient.
    """
    log_mean = rows.means(log_ratio.detach())
    beyond = log_mean > largest
    ratio = torch.exp(log_mean.clamp(max=largest)).to(log_ratio.dtype)
    # Times 1, with the gradient of the token's log-prob where it has one.
    return ratio, ratio * torch.exp(torch.where(beyond, 0.0, gradient - gradient.detach())), beyond


def _pessimistic(free: torch.Tensor, bounded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The larger of two losses, and where the bounded one is it: there the clip stops the gradient."""
    return torch.maximum(free, bounded), bounded > free
