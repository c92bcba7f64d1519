"""Policy losses that reduce over whole responses; conventions are as in `losses`.

The responses in `rows` must be complete; inactive tokens do not count.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from dagrl.algorithms.kl import LARGEST_LOG, ratio_of
from dagrl.algorithms.losses import PolicyLoss, PolicyTokens, pessimistic, ppo_clip, unclipped
from dagrl.algorithms.rows import RowReducer

_LARGEST_LOG_OF_GSPO = 10.0
"""Upper bound of the mean log-ratio of a response in `gspo`, as in verl and siiRL."""
_FUTURE_OF_UNSAFE = (0.8, 1.0)
"""Bounds of the weight in `fipo` of tokens beyond `future_safety`, as in the authors' code and ms-swift."""


def gspo(tokens: PolicyTokens, *, rows: RowReducer, clip_low: float, clip_high: float) -> PolicyLoss:
    """Group sequence policy optimization: PPO's clip on the ratio of whole responses, s = exp(mean of log r).

    arXiv 2507.18071, in the form of eq. 13 and 14, GSPO-token: max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A),
    where each token has the value of s and the gradient of its own log-prob. If the tokens of a response share one
    advantage and are averaged (``seq-mean-token-mean``), value and gradient are as in eq. 5. The paper's bounds are
    about 1e-4, because the geometric mean over a response changes little. s is at most e**10, and tokens beyond it have
    no gradient, as in verl: otherwise the loss is unbounded where A < 0.
    """
    ratio, surrogate, beyond = _of_response(tokens.logprob, tokens.log_ratio, rows, _LARGEST_LOG_OF_GSPO)
    loss, clipped = pessimistic(surrogate, surrogate.clamp(1 - clip_low, 1 + clip_high), tokens.advantage)
    return PolicyLoss(loss, ratio, clipped | beyond)


def gmpo(tokens: PolicyTokens, *, rows: RowReducer, clip_low: float, clip_high: float) -> PolicyLoss:
    """Geometric-mean policy optimization: -A times the geometric mean of a response's clipped ratios.

    arXiv 2507.20673: like GSPO's ratio, but each token is clipped before the mean, only in the direction of the
    advantage, to between exp(-clip_low) and exp(clip_high); the paper uses 0.4 for both. If the tokens of a response
    are averaged (``seq-mean-token-mean``) and share one advantage, the loss and its gradient are those of the
    response's mean. The gradient of a clipped token is 0.

    Arguments are as in `gspo`, except that the bounds apply to the log of a token's ratio.
    """
    log_ratio = tokens.log_ratio
    bounded = log_ratio.clamp(-clip_low, clip_high)
    # The smaller of A log r and A times the bounded one, as in PPO's clip.
    clipped = torch.where(tokens.advantage >= 0, bounded < log_ratio, bounded > log_ratio)
    kept = torch.where(clipped, bounded, log_ratio)
    ratio, surrogate, beyond = _of_response(kept, kept, rows, LARGEST_LOG)
    return PolicyLoss(-tokens.advantage * surrogate, ratio, clipped | beyond)


def topr(tokens: PolicyTokens, *, rows: RowReducer) -> PolicyLoss:
    """Tapered off-policy REINFORCE: -A logprob, times the response's ratio (at most 1, detached) where A < 0.

    arXiv 2503.14286: good responses are imitated even if they have become unlikely, bad ones lose their gradient as
    they become unlikely, so samples of older weights do no harm. `old_logprob` should be the sampler's.
    """
    # Only ratios below 1 matter, and the ratio of a long response may overflow any float.
    of_response = ratio_of(rows.sums(tokens.log_ratio.detach())).to(tokens.logprob.dtype)
    weight = torch.where(tokens.advantage < 0, of_response.clamp(max=1), 1.0)
    return PolicyLoss(
        -weight * tokens.advantage * tokens.logprob, of_response, (tokens.advantage < 0) & (of_response > 1)
    )


def vespo(
    tokens: PolicyTokens, *, rows: RowReducer, k_pos: float, k_neg: float, lambda_pos: float, lambda_neg: float
) -> PolicyLoss:
    """Variational sequence-level soft policy optimization: -sg(phi(R)) A logprob, R the response's ratio.

    arXiv 2602.10693: phi(w) = w**k exp(lambda (1 - w)), which is 1 on policy and fades for responses that have become
    much likelier or less likely, without a clip and without a division by the length. k and lambda are `k_pos` and
    `lambda_pos` where A >= 0, (2, 3) in the authors' code, else `k_neg` and `lambda_neg`, (3, 2). log r of each token
    and log R are kept within -20 and 20.
    """
    of_tokens = tokens.log_ratio.detach().clamp(-LARGEST_LOG, LARGEST_LOG)
    log_ratio = rows.sums(of_tokens).clamp(-LARGEST_LOG, LARGEST_LOG)
    ratio, good = log_ratio.exp(), tokens.advantage >= 0
    shape, rate = torch.where(good, k_pos, k_neg), torch.where(good, lambda_pos, lambda_neg)
    weight = torch.exp(shape * log_ratio + rate * (1 - ratio)).to(tokens.logprob.dtype)
    return unclipped(-weight * tokens.advantage * tokens.logprob, ratio.to(tokens.logprob.dtype))


def fipo(
    tokens: PolicyTokens,
    *,
    rows: RowReducer,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    half_life: float,
    future_low: float,
    future_high: float,
    future_safety: float,
) -> PolicyLoss:
    """Future-KL influenced policy optimization: `ppo_clip` with A times a weight from the later log-ratios of the
    response.

    arXiv 2603.19835: the weight is exp of F_t = sum over j >= t of gamma**(j - t) log r_j, gamma = 2**(-1 /
    `half_life`), kept within 1 - `future_low` and 1 + `future_high`, without gradient. Inactive tokens, and tokens with
    r above `dual_clip`, keep their positions but do not count. Where A < 0 and r > `future_safety` the weight is within
    0.8 and 1, so that tokens far off policy are not pushed harder. A response with more than one token at the dual clip
    leaves the loss, as in the authors' code.
    """
    log_ratio, bad = tokens.log_ratio.detach(), tokens.advantage < 0
    ceiling = math.inf if dual_clip is None else math.log(dual_clip)
    future = rows.suffix_sums(torch.where(log_ratio > ceiling, 0.0, log_ratio), 2 ** (-1 / half_life))
    weight = ratio_of(future).clamp(1 - future_low, 1 + future_high)
    unsafe = bad & (log_ratio > math.log(future_safety))
    weight = torch.where(unsafe, weight.clamp(*_FUTURE_OF_UNSAFE), weight)
    out = rows.sums(bad & (log_ratio > ceiling)) > 1
    weight = torch.where(out, 0.0, weight).to(log_ratio.dtype)
    weighed = replace(tokens, advantage=weight * tokens.advantage)
    result = ppo_clip(weighed, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return replace(result, clipped=result.clipped | out)


def opmd_kimi(tokens: PolicyTokens, *, rows: RowReducer, tau: float) -> PolicyLoss:
    """Mirror descent of Kimi k1.5 (arXiv 2501.12599, section 2.3.2), with squared log-ratios of responses.

    For a response y the loss is -A log pi(y) + tau / 2 (log(pi(y) / pi_old(y)))**2: its gradient is the paper's, A grad
    log pi(y) - tau / 2 grad (log(pi(y) / pi_old(y)))**2, negated. Up to a constant and a factor it is (r - b - tau
    log(pi / pi_old))**2, whose minimum is the target policy of mirror descent.

    The square of the response's sum D is distributed to its tokens as D times each token's term, so it is complete if
    the tokens of a response have equal weights, in any aggregation. The paper's is `seq-mean-token-sum`.
    """
    log_ratio = tokens.log_ratio
    of_response = rows.sums(log_ratio).to(log_ratio.dtype)
    loss = -tokens.advantage * tokens.logprob + tau / 2 * of_response * log_ratio
    return unclipped(loss, ratio_of(log_ratio))


def opmd_pairwise(tokens: PolicyTokens, *, rows: RowReducer, group_id: torch.Tensor, tau: float) -> PolicyLoss:
    """Online policy mirror descent over pairs of responses: -(a - mean of a) logprob, with a detached weight.

    With a = A - tau log(pi(y) / pi_old(y)) for a response y, mirror descent's optimum has the same a for all responses
    to a prompt (see `opmd_kimi`), for any baseline of A: Trinity-RFT's pairwise form (arXiv 2505.17826) minimises the
    sum of (a_i - a_j)**2 over pairs. Over a group of K, divided by 2 tau K, its gradient is that of this loss.

    Arguments are as in `opmd_kimi`, plus `group_id`, the prompt of each token's response, integers [T]. Groups must be
    complete; responses without active tokens do not belong to their group.
    """
    log_ratio = tokens.log_ratio.detach()
    worth = rows.means(tokens.advantage) - tau * rows.sums(log_ratio)
    # Like torch.unique, which would wait for a GPU to return the number of prompts.
    prompt = torch.searchsorted(group_id.sort().values, group_id)
    totals = torch.zeros(2, len(prompt), dtype=worth.dtype, device=worth.device)
    of_responses = torch.where(rows.once, torch.stack([worth, torch.ones_like(worth)]), 0.0)
    total, count = totals.index_add(1, prompt, of_responses)
    weight = (worth - (total / count.clamp(min=1))[prompt]).to(tokens.logprob.dtype)
    return unclipped(-weight * tokens.logprob, ratio_of(log_ratio))


def off_policy(tokens: PolicyTokens, *, rows: RowReducer, delta: float) -> torch.Tensor:
    """Tokens with A < 0 of responses that have become less likely by more than `delta` a token; bool [T].

    The off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556, eq. 8 and 9): the mean of -log r over the response
    is compared. The policy does not need to unlearn responses that it would hardly sample any more.
    """
    return (tokens.advantage < 0) & (rows.means(-tokens.log_ratio.detach()) > delta)


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
