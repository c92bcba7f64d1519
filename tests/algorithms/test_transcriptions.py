"""Losses, masks and divergences as other frameworks write them, over padded batches, beside dagrl's over packed tokens.

Value and gradient are compared on random responses of random lengths with tokens outside the mask.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dagrl.algorithms.covariance import beyond_moment, squared_log_ratios
from dagrl.algorithms.kl import kl_estimate
from dagrl.algorithms.losses import PolicyTokens, dppo_kl, dppo_tv, dro, m2po, reinforce
from dagrl.algorithms.response_losses import fipo, off_policy, vespo
from dagrl.algorithms.rollout_correction import rejected
from dagrl.algorithms.rows import RowReducer
from dagrl.data.batch import Column

LONGEST, RESPONSES = 12, 5
SEEDS = range(12)


class Padded:
    """Responses [RESPONSES, LONGEST]: log-probs now and before, one advantage each, and what counts."""

    def __init__(self, seed: int, spread: float = 0.8) -> None:
        random = np.random.default_rng(seed)
        shape, lengths = (RESPONSES, LONGEST), random.integers(1, LONGEST + 1, RESPONSES)
        self.inside = torch.from_numpy(np.arange(LONGEST) < lengths[:, None])
        self.mask = torch.from_numpy(random.random(shape) < 0.8) & self.inside
        old = -random.exponential(1.0, shape)
        self.old = torch.from_numpy(old)
        self.logprob = torch.from_numpy(np.minimum(old + random.normal(scale=spread, size=shape), -1e-3))
        self.advantage = torch.from_numpy(random.normal(size=(RESPONSES, 1))).expand(shape)
        self.reference = torch.from_numpy(-random.exponential(1.0, shape))

    def packed(self, logprob: torch.Tensor) -> tuple[PolicyTokens, RowReducer]:
        row = torch.arange(RESPONSES)[:, None].expand(self.inside.shape)[self.inside]
        tokens = PolicyTokens(logprob[self.inside], self.old[self.inside], self.advantage[self.inside])
        return tokens, RowReducer(row, self.mask[self.inside])

    def compare(
        self,
        here: Callable[[PolicyTokens, RowReducer], torch.Tensor],
        there: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Assert that values and gradients are the same where the mask is 1; returns the gradient."""
        results = []
        for is_here in (True, False):
            logprob = self.logprob.clone().requires_grad_()
            if is_here:
                losses = torch.zeros(self.mask.shape, dtype=torch.float64)
                losses[self.inside] = here(*self.packed(logprob))
            else:
                losses = there(logprob)
            losses = torch.where(self.mask, losses, 0.0)
            losses.sum().backward()
            results.append((losses.detach(), logprob.grad))
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)
        return results[0][1]


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum(-1, keepdim=True)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_is_that_of_verl(seed: int, kind: str) -> None:
    batch, low, high, cap = Padded(seed), 0.05, 0.1, 3.0

    def there(logprob: torch.Tensor) -> torch.Tensor:
        log_ratio = (logprob - batch.old).clamp(-20, 20)
        p, a = logprob.exp(), batch.old.exp()
        if kind == "tv":
            invalid = torch.where(batch.advantage > 0, p - a > high, p - a < -low)
        else:
            kl = a * (batch.old - logprob) + (1 - a) * torch.log((1.0 - a + 1e-8) / (1.0 - p + 1e-8))
            invalid = torch.where(batch.advantage > 0, (p > a) & (kl > high), (p < a) & (kl > low))
        weight = log_ratio.exp().clamp(max=cap) * (1.0 - invalid.double())
        return -weight.detach() * batch.advantage * logprob

    loss = dppo_tv if kind == "tv" else dppo_kl
    bounds = {"clip_low": low, "clip_high": high}
    gradient = batch.compare(lambda tokens, _: loss(tokens, **bounds, ratio_cap=cap).loss, there)
    assert (gradient[batch.mask] == 0).any() and gradient.any()


@pytest.mark.parametrize("seed", SEEDS)
def test_dppo_without_a_cap_has_the_gradient_of_skyrls_surrogate(seed: int) -> None:
    batch = Padded(seed)

    def there(logprob: torch.Tensor) -> torch.Tensor:
        moved = logprob.exp() - batch.old.exp()
        out = torch.where(batch.advantage > 0, moved > 0.2, moved < -0.2)
        return -(logprob - batch.old).exp() * batch.advantage * ~out

    logprobs = []
    for loss in (lambda now: dppo_tv(batch.packed(now)[0], clip_low=0.2, clip_high=0.2).loss, there):
        logprob = batch.logprob.clone().requires_grad_()
        result = loss(logprob)
        result[batch.inside if result.dim() > 1 else slice(None)].sum().backward()
        logprobs.append(logprob.grad)
    torch.testing.assert_close(*logprobs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("trust_region", ["dppo", "ipo"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_losses_of_prime_rl_have_the_gradient_of_masks_and_k2(seed: int, trust_region: str) -> None:
    batch, tau = Padded(seed), 1e-3

    def there(tokens: PolicyTokens) -> torch.Tensor:
        log_ratio = tokens.logprob - tokens.old_logprob
        moved = (tokens.logprob.exp() - tokens.old_logprob.exp()).detach()
        toward = torch.where(tokens.advantage > 0, moved, -moved) if trust_region == "dppo" else moved.abs()
        return -log_ratio.exp() * tokens.advantage * (toward <= 0.1) + tau * log_ratio**2

    def here(tokens: PolicyTokens, rows: RowReducer) -> torch.Tensor:
        now, old = tokens.logprob, tokens.old_logprob
        if trust_region == "dppo":
            policy = dppo_tv(tokens, clip_low=0.1, clip_high=0.1).loss
        else:
            out = rejected(now.detach(), old, rows, criterion="token_tv", upper=0.1)
            policy = reinforce(tokens).loss * (now - old).exp().detach() * ~out
        return policy + 2 * tau * kl_estimate(now, old, "k2", old)

    gradients = []
    for loss in (here, lambda tokens, _: there(tokens)):
        logprob = batch.logprob.clone().requires_grad_()
        tokens, rows = batch.packed(logprob)
        loss(tokens, rows)[rows.active].sum().backward()
        gradients.append(logprob.grad)
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_dro_is_that_of_verl(seed: int) -> None:
    batch, beta = Padded(seed), 0.3
    batch.compare(
        lambda tokens, _: dro(tokens, tau=beta).loss,
        lambda logprob: -(logprob * batch.advantage - 0.5 * beta * (logprob - batch.old) ** 2),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_vespo_is_that_of_its_authors(seed: int) -> None:
    batch = Padded(seed, spread=0.3)

    def there(logprob: torch.Tensor) -> torch.Tensor:
        log_ratio = (logprob - batch.old).detach().clamp(-20, 20)
        total = masked_sum(log_ratio, batch.mask).clamp(-20, 20)
        k = torch.where(batch.advantage >= 0, 2.0, 3.0)
        rate = torch.where(batch.advantage >= 0, 3.0, 2.0)
        weight = total.exp()
        log_weight = weight.clamp(min=1e-8).log()
        phi = (rate + k * log_weight - rate * weight).exp().nan_to_num(0.0, 0.0, 0.0)
        return -phi * batch.advantage * logprob

    shapes = {"k_pos": 2.0, "k_neg": 3.0, "lambda_pos": 3.0, "lambda_neg": 2.0}
    batch.compare(lambda tokens, rows: vespo(tokens, rows=rows, **shapes).loss, there)


@pytest.mark.parametrize("dual_clip", [None, 2.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_fipo_is_that_of_its_authors(seed: int, dual_clip: float | None) -> None:
    batch, gamma = Padded(seed), 2 ** (-1 / 4.0)

    def there(logprob: torch.Tensor) -> torch.Tensor:
        log_ratio = logprob - batch.old
        ratio = log_ratio.exp()
        taken = batch.mask & (ratio.detach() <= (dual_clip or math.inf))
        place = torch.arange(LONGEST)
        ahead = place[None, :] - place[:, None]
        decay = torch.where(ahead >= 0, gamma ** ahead.clamp(min=0).double(), 0.0)
        future = (log_ratio.detach() * taken) @ decay.T
        weight = future.exp().clamp(1.0, 1.2)
        weight = torch.where((batch.advantage < 0) & (ratio.detach() > 1.5), weight.clamp(0.8, 1.0), weight)
        advantage = batch.advantage * weight
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        if dual_clip is None:
            return loss
        lower = torch.minimum(-advantage * dual_clip, loss)
        at_dual = (batch.advantage < 0) & (loss > -advantage * dual_clip) & batch.mask
        loss = torch.where(batch.advantage < 0, lower, loss)
        return loss * (at_dual.sum(-1, keepdim=True) <= 1)

    options = {"half_life": 4.0, "future_low": 0.0, "future_high": 0.2, "future_safety": 1.5}
    clips = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual_clip}
    batch.compare(lambda tokens, rows: fipo(tokens, rows=rows, **clips, **options).loss, there)


@pytest.mark.parametrize("dual_clip", [None, 2.0])
@pytest.mark.parametrize("low", [0.0, 0.2])
@pytest.mark.parametrize("seed", SEEDS)
def test_fipo_is_that_of_ms_swift_but_for_responses_that_leave(seed: int, low: float, dual_clip: float | None) -> None:
    batch, ceiling = Padded(seed), dual_clip or math.inf
    ratio = (batch.logprob - batch.old).exp()
    at_dual = batch.mask & (batch.advantage < 0) & (ratio > ceiling)
    batch.mask &= at_dual.sum(-1, keepdim=True) <= 1

    def there(logprob: torch.Tensor) -> torch.Tensor:
        log_ratio = logprob - batch.old
        ratio = log_ratio.exp()
        counted = torch.where(batch.mask & (ratio <= ceiling), log_ratio, 0.0).detach()
        future = torch.zeros(RESPONSES, LONGEST + 1, dtype=torch.float64)
        for place in reversed(range(LONGEST)):
            future[:, place] = counted[:, place] + 2 ** (-1 / 4.0) * future[:, place + 1]
        weight = future[:, :-1].exp().clamp(1 - low, 1.2)
        weight = torch.where((batch.advantage < 0) & (ratio > 1.5), weight.clamp(0.8, 1.0), weight).detach()
        bounded = torch.minimum(ratio.clamp(max=ceiling) * batch.advantage, ratio.clamp(0.8, 1.28) * batch.advantage)
        return -bounded * weight

    options = {"half_life": 4.0, "future_low": low, "future_high": 0.2, "future_safety": 1.5}
    clips = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual_clip}
    batch.compare(lambda tokens, rows: fipo(tokens, rows=rows, **clips, **options).loss, there)


@pytest.mark.parametrize("threshold", [0.001, 0.04, 100.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_m2po_masks_the_tokens_that_trinitys_does(seed: int, threshold: float) -> None:
    batch = Padded(seed)

    def masks(logprob: torch.Tensor) -> torch.Tensor:
        ratio = (logprob - batch.old).exp().detach()
        region = ((batch.advantage > 0) & (ratio > 1)) | ((batch.advantage < 0) & (ratio < 1))
        places = sorted(
            (ratio[place].log().item() ** 2, place) for place in map(tuple, (region & batch.mask).nonzero())
        )
        kept, total = torch.ones_like(batch.mask), 0.0
        for count, (square, place) in enumerate(places, 1):
            total += square
            kept[place] = total / count <= threshold
        return kept

    def there(logprob: torch.Tensor) -> torch.Tensor:
        return -batch.advantage * (logprob - batch.old).exp() * masks(logprob)

    def here(tokens: PolicyTokens, rows: RowReducer) -> torch.Tensor:
        offsets = np.concatenate([[0], batch.inside.sum(-1).cumsum(0)])
        columns = [
            Column(each.detach().double().numpy(), offsets)
            for each in (tokens.logprob, tokens.old_logprob, tokens.advantage, rows.active)
        ]
        marks = beyond_moment(squared_log_ratios(*columns), threshold)
        return m2po(tokens, clip_cov_mask=torch.from_numpy(marks)).loss

    gradient = batch.compare(here, there)
    assert (gradient[batch.mask] == 0).any() == (threshold < 100)


@pytest.mark.parametrize("delta", [1e-4, 0.1, 0.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_off_policy_mask_is_that_of_slime_and_trl(seed: int, delta: float) -> None:
    batch = Padded(seed)
    difference = masked_sum(batch.old - batch.logprob, batch.mask) / masked_sum(torch.ones(1), batch.mask).clamp(min=1)
    there = (batch.advantage < 0) & (difference > delta)
    tokens, rows = batch.packed(batch.logprob)
    assert off_policy(tokens, rows=rows, delta=delta).tolist() == there[batch.inside].tolist()


@pytest.mark.parametrize("estimator", ["k1*", "k2*", "k3*"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_unbiased_divergence_is_that_of_slime(seed: int, estimator: str) -> None:
    batch = Padded(seed)

    def there(logprob: torch.Tensor) -> torch.Tensor:
        log_ratio = logprob - batch.reference
        kl = {"k1*": log_ratio, "k2*": log_ratio**2 / 2, "k3*": (-log_ratio).exp() - 1 + log_ratio}[estimator]
        kl = (logprob - batch.old).exp() * kl
        return kl.clamp(-10, 10) if estimator == "k3*" else kl

    reference = batch.reference[batch.inside]
    batch.compare(lambda tokens, _: kl_estimate(tokens.logprob, reference, estimator, tokens.old_logprob), there)


@pytest.mark.parametrize("level", ["token", "seq_sum", "seq_mean", "seq_max"])
@pytest.mark.parametrize("kind", ["binary_kl", "tv"])
@pytest.mark.parametrize("seed", SEEDS)
def test_kpop_and_ipo_keep_the_tokens_that_areal_and_prime_rl_keep(seed: int, kind: str, level: str) -> None:
    batch, upper = Padded(seed), 0.1
    p, q = (each.exp().clamp(1e-8, 1 - 1e-8) for each in (batch.logprob, batch.old))

    def divergence(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()

    metric = torch.maximum(divergence(p, q), divergence(q, p)) if kind == "binary_kl" else (p - q).abs()
    match level:
        case "seq_sum":
            metric = masked_sum(metric, batch.mask).expand(metric.shape)
        case "seq_mean":
            metric = (masked_sum(metric, batch.mask) / batch.mask.sum(-1, keepdim=True)).expand(metric.shape)
        case "seq_max":
            metric = torch.where(batch.mask, metric, 0.0).amax(-1, keepdim=True).expand(metric.shape)
    there = batch.mask & ~(metric <= upper)
    tokens, rows = batch.packed(batch.logprob)
    found = rejected(tokens.logprob, tokens.old_logprob, rows, criterion=f"{level}_{kind}", upper=upper)
    assert found.tolist() == there[batch.inside].tolist()
