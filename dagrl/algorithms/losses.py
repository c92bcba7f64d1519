"""Policy losses of a token by its own log-probs; the caller weights and sums them. See `response_losses`.

In all of them r = exp(logprob - old) is the ratio of a token's new to its old probability, tensors have shape [T], and
only `logprob` has a gradient.

Losses and gradients are finite for finite log-probs: r is at most e**20, and a token beyond that has no gradient
through r, as in verl. NaN log-probs give NaN losses: see `refusable`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dagrl.algorithms.kl import k3, ratio_of

_STEEPEST_DRIFT = 2.0
"""Upper bound of the gradient of CPGD's drift with respect to the log-prob: siiRL's bound of r - 1."""


_LEAST_REST = 1e-8
"""Added to the probabilities of all other tokens in `dppo_kl`, as in verl and SkyRL."""


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
    """Ratio of new to old probability of a token, detached; with `gspo`, `gmpo`, `topr` and `vespo` of its response."""
    clipped: torch.Tensor
    """Tokens without gradient because of a clip or, with `cispo`, `dppo` and `topr`, with a reduced weight; bool."""


def ppo_clip(tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> PolicyLoss:
    """PPO's clipped surrogate, negated: max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A).

    arXiv 1707.06347, eq. 7, which uses one epsilon for both bounds; a separate upper bound is Clip-Higher of DAPO
    (arXiv 2503.14476, section 3.1). `dual_clip` c bounds the loss by -c A where A < 0, where it is otherwise unbounded
    as the ratio grows (dual-clip PPO, arXiv 1912.09729).
    """
    ratio = tokens.ratio
    loss, clipped = pessimistic(ratio, ratio.clamp(1 - clip_low, 1 + clip_high), tokens.advantage)
    if dual_clip is not None:
        ceiling = -dual_clip * tokens.advantage
        capped = (tokens.advantage < 0) & (loss > ceiling)
        loss = torch.where(capped, ceiling, loss)
        clipped = clipped | capped
    return PolicyLoss(loss, ratio.detach(), clipped)


def clip_cov(tokens: PolicyTokens, *, clip_cov_mask: torch.Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """PPO's clipped loss, without gradient for tokens with 1 in `clip_cov_mask` [T].

    Clip-Cov (arXiv 2505.22617); `dagrl.algorithms.covariance.drawn` selects the tokens.
    """
    clipping, held = ppo_clip(tokens, clip_low=clip_low, clip_high=clip_high), clip_cov_mask > 0
    return PolicyLoss(torch.where(held, 0.0, clipping.loss), clipping.ratio, clipping.clipped | held)


def kl_cov(tokens: PolicyTokens, *, clip_cov_mask: torch.Tensor, kl_cov_coef: float) -> PolicyLoss:
    """The unclipped surrogate -r A, plus kl_cov_coef abs(log r) for tokens with 1 in `clip_cov_mask` [T].

    KL-Cov (arXiv 2505.22617); `dagrl.algorithms.covariance.highest` selects the tokens. The paper's penalty is
    KL(old || policy), which the authors' code estimates by abs(log r).
    """
    log_ratio = tokens.log_ratio
    ratio = ratio_of(log_ratio)
    loss = -ratio * tokens.advantage + torch.where(clip_cov_mask > 0, kl_cov_coef * log_ratio.abs(), 0.0)
    return unclipped(loss, ratio)


def dppo_tv(tokens: PolicyTokens, *, clip_low: float, clip_high: float, ratio_cap: float | None = None) -> PolicyLoss:
    """DPPO-Binary-TV: -sg(min(r, ratio_cap)) A logprob, with a trust region of probabilities instead of ratios.

    arXiv 2602.04879, eq. 13: a token has no gradient once its probability has moved in the direction of its advantage
    by more than `clip_high` (A > 0) or `clip_low` (else). That difference is the total variation between the policies'
    choices of this token or the rest, so that unlikely tokens are not stopped by their ratio alone. In the paper
    (section 5.2) the old log-probs are the generator's. `ratio_cap` bounds the weight, as in verl.
    """
    moved = tokens.logprob.detach().exp() - tokens.old_logprob.exp()
    up, down = tokens.advantage > 0, tokens.advantage <= 0
    return _weighted(tokens, (up & (moved > clip_high)) | (down & (moved < -clip_low)), ratio_cap)


def dppo_kl(tokens: PolicyTokens, *, clip_low: float, clip_high: float, ratio_cap: float | None = None) -> PolicyLoss:
    """DPPO-Binary-KL: as `dppo_tv`, with bounds on the divergence between the two policies.

    arXiv 2602.04879, eq. 14: KL(old || policy) of the choice between the token and the rest, with old probability a
    and probability p: a log(a / p) + (1 - a) log((1 - a) / (1 - p)), where 1e-8 is added to both 1 - a and 1 - p.
    """
    now, old = tokens.logprob.detach(), tokens.old_logprob
    # expm1 keeps the remaining probability of a likely token, which 1 - exp() would lose in float32.
    rest_now, rest_old = -torch.expm1(now), -torch.expm1(old)
    divergence = old.exp() * (old - now) + rest_old * ((rest_old + _LEAST_REST) / (rest_now + _LEAST_REST)).log()
    up = (tokens.advantage > 0) & (now > old) & (divergence > clip_high)
    down = (tokens.advantage <= 0) & (now < old) & (divergence > clip_low)
    return _weighted(tokens, up | down, ratio_cap)


def m2po(tokens: PolicyTokens, *, clip_cov_mask: torch.Tensor) -> PolicyLoss:
    """The unclipped surrogate -r A, without gradient for tokens with 1 in `clip_cov_mask` [T].

    M2PO (arXiv 2510.01161, algorithm 1), for samples of much older weights; `dagrl.algorithms.covariance.beyond_moment`
    selects the tokens. The old log-probs are the generator's.
    """
    held = clip_cov_mask > 0
    ratio = tokens.ratio
    return PolicyLoss(torch.where(held, 0.0, -tokens.advantage) * ratio, ratio.detach(), held)


def sapo(tokens: PolicyTokens, *, tau_pos: float, tau_neg: float) -> PolicyLoss:
    """Soft adaptive policy optimization: -4 / tau sigmoid(tau (r - 1)) A, a gate in place of PPO's clip.

    arXiv 2511.20347: near ratio 1 the gradient is that of the plain surrogate, and it fades as the ratio moves away.
    tau is `tau_pos` where A > 0 and `tau_neg` elsewhere, 1.0 and 1.05 in the paper, so that it fades faster for tokens
    made less likely. Nothing is clipped.
    """
    ratio = tokens.ratio
    tau = torch.full_like(ratio, tau_neg).masked_fill(tokens.advantage > 0, tau_pos)
    loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * tokens.advantage
    return unclipped(loss, ratio)


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
    loss, clipped = pessimistic(log_ratio, bounded, tokens.advantage)
    if drift_coef:
        near = log_ratio.clamp(max=math.log(1 + _STEEPEST_DRIFT))
        loss = loss + drift_coef * (k3(-near) + _STEEPEST_DRIFT * (log_ratio - near))
    return PolicyLoss(loss, ratio_of(log_ratio.detach()), clipped)


def reinforce(tokens: PolicyTokens) -> PolicyLoss:
    """The plain policy gradient: -A logprob (Williams 1992). Old log-probs are used for metrics only.

    Correct only for samples of the trained policy: one optimizer step per batch.
    """
    return unclipped(-tokens.advantage * tokens.logprob, tokens.ratio)


def opmd(tokens: PolicyTokens, *, tau: float) -> PolicyLoss:
    """The damped policy gradient: -A logprob / (1 + tau). Old log-probs are used for metrics only.

    Online policy mirror descent in Trinity-RFT's simple form (arXiv 2505.17826), also for samples of older weights; the
    advantage is a deviation from the group's mean.
    """
    return unclipped(-tokens.advantage * tokens.logprob / (1 + tau), tokens.ratio)


def without_policy(tokens: PolicyTokens) -> PolicyLoss:
    """No policy loss, for a policy that learns from a teacher alone. Old log-probs are used for metrics only."""
    return unclipped(torch.zeros_like(tokens.logprob), tokens.ratio)


def dro(tokens: PolicyTokens, *, tau: float) -> PolicyLoss:
    """Direct reward optimization: -A logprob + tau / 2 (log r)**2.

    Its optimum has A = tau log r, for samples of any policy (verl's ``dro`` with ``dro_beta``; ROLL's ``kimi15``). Like
    `opmd_kimi`, with squares of tokens in place of squares of responses.
    """
    log_ratio = tokens.log_ratio
    loss = -tokens.advantage * tokens.logprob + tau / 2 * log_ratio.square()
    return unclipped(loss, ratio_of(log_ratio))


def refusable(loss: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The scalar `loss`, with a non-finite gradient in the model's `output` if the loss is not finite.

    The optimizer then skips the step. clamp(), maximum() and relu() have gradient 0 at NaN: a NaN in another model's
    log-probs would make the loss NaN while the optimizer applies the gradient of all other tokens. Does not wait for
    the device.
    """
    return torch.where(loss.isfinite(), loss, loss.detach() * output.sum())


def unclipped(loss: torch.Tensor, ratio: torch.Tensor) -> PolicyLoss:
    """A loss with a gradient at every token."""
    return PolicyLoss(loss, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


def pessimistic(
    free: torch.Tensor, bounded: torch.Tensor, advantage: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The larger of the losses of two surrogates, and a mask of tokens at which the bounded one, without gradient, is
    larger.
    """
    free, bounded = -free * advantage, -bounded * advantage
    return torch.maximum(free, bounded), bounded > free


def _weighted(tokens: PolicyTokens, held: torch.Tensor, cap: float | None) -> PolicyLoss:
    """-sg(r) A logprob with r at most `cap`, and 0 for the tokens in `held`."""
    ratio = tokens.ratio.detach()
    weight = ratio if cap is None else ratio.clamp(max=cap)
    factor = torch.where(held, 0.0, -weight * tokens.advantage)
    return PolicyLoss(factor * tokens.logprob, ratio, held | (weight < ratio))
