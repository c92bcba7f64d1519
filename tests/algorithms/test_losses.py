"""Policy losses at and around the edges of their clips. Probabilities are chosen so that ratios are exact."""

import math
from collections.abc import Callable
from functools import partial
from itertools import chain

import pytest
import torch

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
    reinforce,
    sapo,
)
from dagrl.algorithms.response_losses import fipo, gmpo, gspo, off_policy, opmd_kimi, topr, vespo
from dagrl.algorithms.rows import RowReducer

ONE_ROW = RowReducer(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool))


def clip_one(ratio: float, advantage: float, *, high: float = 0.2, dual: float | None = None):
    """Loss of one token, its gradient in the log-prob, and whether it counts as clipped; lower clip 0.2."""
    logprob = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([advantage], dtype=torch.float64)
    result = ppo_clip(
        PolicyTokens(logprob, torch.zeros_like(logprob), advantages), clip_low=0.2, clip_high=high, dual_clip=dual
    )
    result.loss.sum().backward()
    assert result.ratio.item() == pytest.approx(ratio, abs=1e-15)
    return result.loss.item(), logprob.grad.item(), result.clipped.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # Within the clip: loss -r A, gradient -r A.
        (1.1, 2.0, -2.2, -2.2, False),
        (0.9, -2.0, 1.8, 1.8, False),
        # Gone far enough in the direction of the advantage: loss -(1 +- 0.2) A, no gradient.
        (1.5, 2.0, -2.4, 0.0, True),
        (0.5, -2.0, 1.6, 0.0, True),
        # Gone the wrong way: the clip must not stop the way back.
        (0.5, 2.0, -1.0, -1.0, False),
        (1.5, -2.0, 3.0, 3.0, False),
        # Nothing to gain.
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_each_side_of_the_clip(ratio, advantage, loss, gradient, clipped):
    assert clip_one(ratio, advantage) == (pytest.approx(loss, abs=1e-14), pytest.approx(gradient, abs=1e-14), clipped)


@pytest.mark.parametrize(
    ("ratio", "loss", "gradient", "clipped"),
    [(1.25, -1.25, -1.25, False), (1.35, -1.3, 0.0, True)],
)
def test_the_upper_clip_may_be_higher(ratio, loss, gradient, clipped):
    result = clip_one(ratio, 1.0, high=0.3)
    assert result == (pytest.approx(loss, abs=1e-14), pytest.approx(gradient, abs=1e-14), clipped)


@pytest.mark.parametrize("log_ratio", [19.9, 20.1, 50.0, 88.0, 800.0])
@pytest.mark.parametrize(
    "loss",
    [
        partial(ppo_clip, clip_low=0.2, clip_high=0.2),
        partial(kl_cov, clip_cov_mask=torch.zeros(1), kl_cov_coef=1.0),
        partial(gmpo, rows=ONE_ROW, clip_low=0.2, clip_high=0.2),
    ],
)
def test_a_ratio_grows_to_e20_and_has_no_gradient_beyond(loss, log_ratio: float):
    # A = -2 and no clip on this side: 2 r, as in verl.
    logprob = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    result = loss(PolicyTokens(logprob, torch.full_like(logprob, -log_ratio), torch.full_like(logprob, -2.0)))
    result.loss.sum().backward()
    expected = 2 * math.exp(min(log_ratio, 20.0))
    assert result.loss.item() == pytest.approx(expected)
    assert logprob.grad.item() == pytest.approx(expected if log_ratio < 20 else 0.0)


def test_the_upper_clip_leaves_the_lower_alone():
    assert clip_one(0.75, -1.0, high=0.3) == (pytest.approx(0.8, abs=1e-14), 0.0, True)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # Negative advantage, dual clip 3: the loss r * 2 stops at 3 * 2.
        (2.5, -2.0, 5.0, 5.0, False),
        (4.0, -2.0, 6.0, 0.0, True),
        # The lower clip still holds.
        (0.5, -2.0, 1.6, 0.0, True),
        # Positive advantages know no dual clip.
        (4.0, 2.0, -2.4, 0.0, True),
        (0.9, 0.5, -0.45, -0.45, False),
    ],
)
def test_the_dual_clip_bounds_negative_advantages(ratio, advantage, loss, gradient, clipped):
    result = clip_one(ratio, advantage, dual=3.0)
    assert result == (pytest.approx(loss, abs=1e-14), pytest.approx(gradient, abs=1e-14), clipped)


@pytest.mark.parametrize("edge", [0.75, 1.25])
def test_at_the_very_edge_the_gradient_is_whole(edge):
    # 0.75 and 1.25 are exact in binary, and so is their log's exp here: the clip is met, not crossed.
    logprob = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    old = -torch.tensor([edge, edge], dtype=torch.float64).log()
    advantage = torch.tensor([1.0, -1.0], dtype=torch.float64)
    exact = torch.equal(torch.exp(-old), torch.tensor([edge, edge], dtype=torch.float64))
    assert exact, "the test needs a ratio that is exactly on the edge"
    result = ppo_clip(PolicyTokens(logprob, old, advantage), clip_low=0.25, clip_high=0.25)
    result.loss.sum().backward()
    assert not result.clipped.any()
    assert logprob.grad.tolist() == [-edge, edge]


def one_token(loss: Callable[..., PolicyLoss], ratio: float, advantage: float, **options: float):
    """Loss of a token of log-prob log(ratio), old log-prob 0; its gradient, and whether it counts as clipped."""
    logprob = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([advantage], dtype=torch.float64)
    result = loss(PolicyTokens(logprob, torch.zeros_like(logprob), advantages), **options)
    result.loss.sum().backward()
    assert result.ratio.item() == pytest.approx(ratio, abs=1e-15)
    assert not result.ratio.requires_grad
    return result.loss.item(), logprob.grad.item(), result.clipped.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [(1.1, 2.0, 1.1, False), (1.5, 2.0, 1.2, True), (1.5, -2.0, 1.2, True), (0.1, 2.0, 0.1, False)],
)
def test_cispo_bounds_the_weight_and_keeps_the_gradient(ratio, advantage, weight, clipped):
    # Loss -w A log-prob, gradient -w A: the weight itself has none.
    loss, gradient, marked = one_token(cispo, ratio, advantage, clip_high=0.2)
    assert loss == pytest.approx(-weight * advantage * math.log(ratio), abs=1e-14)
    assert (gradient, marked) == (pytest.approx(-weight * advantage, abs=1e-14), clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "bounded", "gradient", "clipped"),
    [
        # Within the clip, and on the way back: -A log r, whose gradient is -A, not -r A.
        (1.1, 2.0, 1.1, -2.0, False),
        (0.5, 2.0, 0.5, -2.0, False),
        (1.5, -2.0, 1.5, 2.0, False),
        # Far enough: -A log of the bound, 1.3 above and 0.8 below, without gradient.
        (1.5, 2.0, 1.3, 0.0, True),
        (0.5, -2.0, 0.8, 0.0, True),
    ],
)
def test_cpgd_clips_the_log_of_the_ratio(ratio, advantage, bounded, gradient, clipped):
    result = one_token(cpgd, ratio, advantage, clip_low=0.2, clip_high=0.3, drift_coef=0.0)
    expected = -advantage * math.log(bounded)
    assert result == (pytest.approx(expected, abs=1e-14), pytest.approx(gradient, abs=1e-14), clipped)


def test_the_drift_of_cpgd_pulls_back_to_the_old_policy():
    # k3 of KL(old || policy) at ratio 1.5: 1.5 - 1 - log 1.5, with gradient 1.5 - 1; a clipped token is pulled too.
    drift = 0.1 * (0.5 - math.log(1.5))
    result = one_token(cpgd, 1.5, 0.0, clip_low=0.2, clip_high=0.2, drift_coef=0.1)
    assert result == (pytest.approx(drift, abs=1e-14), pytest.approx(0.05, abs=1e-14), False)
    result = one_token(cpgd, 1.5, 2.0, clip_low=0.2, clip_high=0.2, drift_coef=0.1)
    assert result == (pytest.approx(drift - 2 * math.log(1.2), abs=1e-14), pytest.approx(0.05, abs=1e-14), True)


@pytest.mark.parametrize("log_ratio", [-800.0, -50.0, -1.0, 0.0, 0.5, 1.09, 1.11, 3.0, 50.0, 88.0, 800.0])
def test_the_drift_of_cpgd_pulls_no_harder_than_siirls(log_ratio):
    # siiRL's gradient is r - 1, at most 2. The drift is r - 1 - log r up to log r = log 3, then a straight line.
    logprob = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(1, dtype=torch.float64)
    result = cpgd(PolicyTokens(logprob, nothing, nothing), clip_low=0.2, clip_high=0.2, drift_coef=0.1)
    result.loss.sum().backward()
    near = min(log_ratio, math.log(3))
    drift = math.exp(near) - 1 - near + 2 * (log_ratio - near)
    assert result.loss.item() == pytest.approx(0.1 * drift, abs=1e-12)
    assert logprob.grad.item() == pytest.approx(0.1 * min(math.expm1(near), 2.0), abs=1e-12)


def test_reinforce_does_not_look_at_the_ratio():
    assert one_token(reinforce, 4.0, 2.0) == (pytest.approx(-2 * math.log(4)), -2.0, False)


@pytest.mark.parametrize(
    ("ratio", "advantage", "held", "loss", "gradient", "clipped"),
    [
        (1.1, 2.0, 0.0, -2.2, -2.2, False),
        (1.5, 2.0, 0.0, -2.4, 0.0, True),
        (1.1, 2.0, 1.0, 0.0, 0.0, True),
    ],
)
def test_clip_cov_takes_marked_tokens_out_of_ppo(ratio, advantage, held, loss, gradient, clipped):
    def marked(tokens, held):
        return clip_cov(tokens, clip_cov_mask=torch.tensor([held]), clip_low=0.2, clip_high=0.2)

    result = one_token(marked, ratio, advantage, held=held)
    assert result == (pytest.approx(loss, abs=1e-14), pytest.approx(gradient, abs=1e-14), clipped)


@pytest.mark.parametrize(
    ("ratio", "held", "loss", "gradient"),
    [
        # Never clipped, however far: -r A.
        (5.0, 0.0, -10.0, -10.0),
        # The marked are drawn back, upwards or downwards: + 3 abs(log r).
        (5.0, 1.0, -10 + 3 * math.log(5), -7.0),
        (0.25, 1.0, -0.5 + 3 * math.log(4), -3.5),
    ],
)
def test_kl_cov_draws_marked_tokens_back(ratio, held, loss, gradient):
    result = one_token(kl_cov, ratio, 2.0, clip_cov_mask=torch.tensor([held]), kl_cov_coef=3.0)
    assert result == (pytest.approx(loss, abs=1e-14), pytest.approx(gradient, abs=1e-14), False)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # At 1 the gate is half open: -A 4 / tau / 2, and the gradient is that of -r A.
        (1.0, 3.0, -6.0, -3.0),
        (1.0, -3.0, 3.0, 3.0),
        # sigmoid(log 3) = 3/4 and sigmoid(-log 3) = 1/4, with gradient 4 * 3/16 * r A.
        (1 + math.log(3), 1.0, -3.0, -0.75 * (1 + math.log(3))),
        (1 - math.log(3) / 2, -1.0, 0.5, 0.75 * (1 - math.log(3) / 2)),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_sapo_closes_a_gate_as_the_ratio_moves(ratio, advantage, loss, gradient):
    # tau is 1 where the advantage is positive, 2 elsewhere.
    result = one_token(sapo, ratio, advantage, tau_pos=1.0, tau_neg=2.0)
    assert result == (pytest.approx(loss, abs=1e-14), pytest.approx(gradient, abs=1e-14), False)


def test_topr_forgets_bad_responses_that_have_become_unlikely():
    # Ratios of responses: 4 * 1/8 = 1/2, 2 * 3 = 6, and exp(900), too much for a float; the last token does not count.
    log_ratio = torch.tensor([math.log(4), -math.log(8), math.log(2), math.log(3), 900.0, 7.0], dtype=torch.float64)
    rows = RowReducer(torch.tensor([0, 0, 1, 1, 3, 3]), torch.tensor([True] * 5 + [False]))
    for advantage, weights, clipped in (
        (0.5, [1, 1, 1, 1, 1], [False] * 5),
        (-2.0, [0.5, 0.5, 1, 1, 1], [False, False, True, True, True]),
    ):
        logprob = log_ratio.clone().requires_grad_()
        result = topr(PolicyTokens(logprob, torch.zeros_like(logprob), torch.full_like(logprob, advantage)), rows=rows)
        result.loss[:5].sum().backward()
        assert logprob.grad.tolist()[:5] == pytest.approx([-advantage * weight for weight in weights])
        assert result.loss.tolist()[:4] == pytest.approx(
            [-advantage * weight * each for weight, each in zip(weights, log_ratio.tolist()[:4], strict=False)]
        )
        assert result.clipped.tolist()[:5] == clipped
        assert result.ratio.tolist()[:4] == pytest.approx([0.5, 0.5, 6, 6])
        assert math.isfinite(result.ratio[4])


def test_mirror_descent_in_its_simple_form_is_reinforce_held_back():
    # 2 log 4 / (1 + 3), gradient 2 / 4.
    assert one_token(opmd, 4.0, 2.0, tau=3.0) == (pytest.approx(-math.log(4) / 2), -0.5, False)


def test_mirror_descent_of_kimi_draws_whole_responses_back():
    # Ratios 2 and 4 of one response: D = log 8; 1/2 of the other, whose second token does not count.
    logprob = torch.tensor([2.0, 4.0, 0.5, 9.0], dtype=torch.float64).log().requires_grad_()
    rows = RowReducer(torch.tensor([0, 0, 2, 2]), torch.tensor([True, True, True, False]))
    advantage = torch.tensor([1.0, 1.0, -2.0, -2.0], dtype=torch.float64)
    result = opmd_kimi(PolicyTokens(logprob, torch.zeros(4, dtype=torch.float64), advantage), rows=rows, tau=0.5)
    first, second = result.loss[:2].sum(), result.loss[2]
    # -A log pi + tau / 2 D^2 of each response: -log 8 + (log 8)^2 / 4 and -2 log 2 + (log 2)^2 / 4.
    assert first.item() == pytest.approx(-math.log(8) + math.log(8) ** 2 / 4)
    assert second.item() == pytest.approx(-2 * math.log(2) + math.log(2) ** 2 / 4)
    (first + second).backward()
    # -A + tau D for each token of a response: -1 + log 8 / 2, and 2 - log 2 / 2.
    expected = [math.log(8) / 2 - 1, math.log(8) / 2 - 1, 2 - math.log(2) / 2, 0]
    assert logprob.grad.tolist() == pytest.approx(expected)
    assert (result.ratio.tolist(), result.clipped.any().item()) == (pytest.approx([2, 4, 0.5, 9]), False)


def gspo_rows(ratios: list[list[float]], advantages: list[float], active: list[list[bool]], **clips: float):
    """Losses of the tokens, their gradients, ratios and clips, for responses of such tokens; row 1 has none."""
    row = torch.tensor([0] * len(ratios[0]) + [2] * len(ratios[1]))
    logprob = torch.tensor([math.log(each) for each in chain(*ratios)], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor(advantages, dtype=torch.float64)[row // 2]
    counts = torch.tensor(list(chain(*active)))
    result = gspo(PolicyTokens(logprob, torch.zeros_like(logprob), advantage), rows=RowReducer(row, counts), **clips)
    result.loss.sum().backward()
    return result.loss.tolist(), logprob.grad.tolist(), result.ratio.tolist(), result.clipped.tolist()


def test_gspo_has_one_ratio_for_a_response():
    # (4 * 1)^(1/2) = 2 and (1/4 * 1/4)^(1/2) = 1/4; the inactive token's 100 is not in it. Bounds far away.
    loss, gradient, ratio, clipped = gspo_rows(
        [[4.0, 1.0], [0.25, 0.25, 100.0]], [1.0, -2.0], [[True, True], [True, True, False]], clip_low=0.9, clip_high=9.0
    )
    assert ratio == pytest.approx([2, 2, 0.25, 0.25, 0.25], abs=1e-14)
    assert loss == pytest.approx([-2, -2, 0.5, 0.5, 0.5], abs=1e-14)
    # Eq. 14: s times the gradient of the token's own log-prob.
    assert gradient == pytest.approx([-2, -2, 0.5, 0.5, 0.5], abs=1e-14)
    assert not any(clipped)


def test_gspo_clips_whole_responses():
    # 2 with advantage 1 is beyond 1.5, though the second token alone is not; 1/4 with advantage 2 is on the way back.
    loss, gradient, _, clipped = gspo_rows(
        [[4.0, 1.0], [0.25]], [1.0, 2.0], [[True, True], [True]], clip_low=0.2, clip_high=0.5
    )
    assert loss == pytest.approx([-1.5, -1.5, -0.5], abs=1e-14)
    assert gradient == pytest.approx([0, 0, -0.5], abs=1e-14)
    assert clipped == [True, True, False]


@pytest.mark.parametrize(
    ("log_mean", "advantage", "loss", "gradient", "clipped"),
    [
        # As in verl: s = exp(log_mean), at most e^10, and beyond that without gradient.
        (9.9, -2.0, 2 * math.exp(9.9), 2 * math.exp(9.9), False),
        (10.1, -2.0, 2 * math.exp(10), 0.0, True),
        (25.0, -2.0, 2 * math.exp(10), 0.0, True),
        (800.0, -2.0, 2 * math.exp(10), 0.0, True),
        # With A above 0 the clip is met first; on the way back nothing bounds the gradient but s itself.
        (800.0, 2.0, -2.4, 0.0, True),
        (-800.0, 2.0, 0.0, 0.0, False),
        (-800.0, -2.0, 1.6, 0.0, True),
    ],
)
def test_gspo_is_verls_in_value_and_gradient_however_far(log_mean, advantage, loss, gradient, clipped):
    # Two tokens of log-ratios log_mean + 3 and log_mean - 3, and one that does not count.
    logprob = torch.tensor([log_mean + 3, log_mean - 3, 900.0], dtype=torch.float64, requires_grad=True)
    rows = RowReducer(torch.zeros(3, dtype=torch.int64), torch.tensor([True, True, False]))
    tokens = PolicyTokens(logprob, torch.zeros_like(logprob), torch.full_like(logprob, advantage))
    result = gspo(tokens, rows=rows, clip_low=0.2, clip_high=0.2)
    result.loss[:2].sum().backward()
    assert result.loss.tolist()[:2] == pytest.approx([loss, loss])
    assert logprob.grad.tolist() == pytest.approx([gradient, gradient, 0.0])
    assert result.clipped.tolist()[:2] == [clipped, clipped]
    assert result.ratio.max() <= math.exp(10)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (ppo_clip, {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}),
        (cpgd, {"clip_low": 0.2, "clip_high": 0.3, "drift_coef": 0.5}),
        (reinforce, {}),
        (sapo, {"tau_pos": 1.0, "tau_neg": 1.05}),
        (opmd, {"tau": 0.5}),
    ],
)
def test_gradients_are_those_of_the_value(loss, options):
    random = torch.Generator().manual_seed(0)
    old, advantage = torch.randn(2, 40, generator=random, dtype=torch.float64)
    logprob = (old + torch.randn(40, generator=random, dtype=torch.float64)).requires_grad_()
    torch.autograd.gradcheck(lambda now: loss(PolicyTokens(now, old, advantage), **options).loss, logprob)


def moved(loss: Callable[..., PolicyLoss], old: float, now: float, advantage: float, **options: float):
    """Gradient of a token whose probability has moved, and whether it counts as clipped."""
    logprob = torch.tensor([now], dtype=torch.float64).log().requires_grad_()
    before = torch.tensor([old], dtype=torch.float64).log()
    result = loss(PolicyTokens(logprob, before, torch.full_like(before, advantage)), **options)
    result.loss.sum().backward()
    expected = 0.0 if logprob.grad.item() == 0 else logprob.grad.item() * math.log(now)
    # The weight has no gradient: the loss is the gradient times the log-prob.
    assert result.loss.item() == pytest.approx(expected, abs=1e-14)
    assert result.ratio.item() == pytest.approx(now / old, abs=1e-12)
    return logprob.grad.item(), result.clipped.item()


@pytest.mark.parametrize(
    ("old", "now", "advantage", "gradient", "clipped"),
    [
        # A ratio of 4, which PPO clips, is a move by 0.03: the weight is the ratio.
        (0.01, 0.04, 2.0, -8.0, False),
        # From 0.5 up by 0.25 or 0.35, bound 0.3.
        (0.5, 0.75, 2.0, -3.0, False),
        (0.5, 0.85, 2.0, 0.0, True),
        # Down by 0.15 or 0.25, bound 0.2; an advantage of 0 is held by the lower bound, as in verl.
        (0.5, 0.35, -2.0, 1.4, False),
        (0.5, 0.25, -2.0, 0.0, True),
        (0.5, 0.25, 0.0, 0.0, True),
        # The way back is free, however far.
        (0.5, 0.95, -2.0, 3.8, False),
        (0.5, 0.05, 2.0, -0.2, False),
    ],
)
def test_dppo_bounds_the_change_of_a_probability(old, now, advantage, gradient, clipped):
    result = moved(dppo_tv, old, now, advantage, clip_low=0.2, clip_high=0.3)
    assert result == (pytest.approx(gradient, abs=1e-12), clipped)


@pytest.mark.parametrize(
    ("old", "now", "advantage", "gradient", "clipped"),
    [
        # KL of (1/2, 1/2) from (3/4, 1/4): log(2/3) / 2 + log(2) / 2 = 0.1438; from (1/4, 3/4) the same.
        (0.5, 0.75, 2.0, 0.0, True),
        (0.5, 0.25, -2.0, 0.0, True),
        # Of (1/2, 1/2) from (0.6, 0.4): 0.5 log(5/6) + 0.5 log(5/4) = 0.0204.
        (0.5, 0.6, 2.0, -2.4, False),
        (0.5, 0.4, -2.0, 1.6, False),
        # The way back.
        (0.5, 0.75, -2.0, 3.0, False),
        (0.5, 0.25, 2.0, -1.0, False),
    ],
)
def test_dppo_bounds_the_divergence_of_one_choice(old, now, advantage, gradient, clipped):
    result = moved(dppo_kl, old, now, advantage, clip_low=0.1, clip_high=0.1)
    assert result == (pytest.approx(gradient, abs=1e-12), clipped)


@pytest.mark.parametrize(("high", "low", "clipped"), [(0.2, 0.1, False), (0.1, 0.2, True)])
def test_the_bounds_of_dppo_are_those_of_their_side(high, low, clipped):
    assert moved(dppo_kl, 0.5, 0.75, 1.0, clip_low=low, clip_high=high)[1] == clipped
    assert moved(dppo_kl, 0.5, 0.25, -1.0, clip_low=high, clip_high=low)[1] == clipped


@pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])
def test_dppo_bounds_its_weight_if_asked_to(loss):
    # Ratio 4 with a cap of 3: the gradient is -3 A.
    assert moved(loss, 0.01, 0.04, 2.0, clip_low=0.2, clip_high=0.2, ratio_cap=3.0) == (pytest.approx(-6.0), True)


@pytest.mark.parametrize(("held", "loss", "gradient"), [(0.0, -10.0, -10.0), (1.0, 0.0, 0.0)])
def test_m2po_leaves_marked_tokens_out(held, loss, gradient):
    # Never clipped, however far: -r A.
    result = one_token(m2po, 5.0, 2.0, clip_cov_mask=torch.tensor([held]))
    assert result == (pytest.approx(loss, abs=1e-14), pytest.approx(gradient, abs=1e-14), bool(held))


def test_dro_draws_each_token_back_by_its_own_log_ratio():
    # -2 log 4 + 0.5 / 2 (log 4)^2, with gradient -2 + 0.5 log 4.
    loss, gradient, clipped = one_token(dro, 4.0, 2.0, tau=0.5)
    assert (loss, clipped) == (pytest.approx(-2 * math.log(4) + 0.25 * math.log(4) ** 2), False)
    assert gradient == pytest.approx(-2 + 0.5 * math.log(4))


def two_responses(ratios: list[float], advantages: list[float], active: list[int] | None = None):
    """A response of all tokens but the last, and one of the last: log-probs with gradient, tokens, rows."""
    logprob = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    counts = torch.tensor(active or [1] * len(ratios)).bool()
    rows = RowReducer(torch.tensor([0] * (len(ratios) - 1) + [1]), counts)
    given = PolicyTokens(logprob, torch.zeros_like(logprob), torch.tensor(advantages, dtype=torch.float64))
    return logprob, given, rows


def test_vespo_fades_as_the_ratio_of_the_response_moves():
    logprob, tokens, rows = two_responses([2.0, 100.0, 2.0, 0.5], [1.0, 1.0, -1.0, 0.0], active=[1, 0, 1, 1])
    result = vespo(tokens, rows=rows, k_pos=2.0, k_neg=3.0, lambda_pos=3.0, lambda_neg=2.0)
    result.loss.sum().backward()
    # R is 4 and 1/2; R^2 exp(3 (1 - R)) where A >= 0, else R^3 exp(2 (1 - R)).
    good, bad = 16 * math.exp(-9), 64 * math.exp(-6)
    assert logprob.grad.tolist() == pytest.approx([-good, -good, bad, 0.0], rel=1e-12)
    assert result.loss.tolist() == pytest.approx([-good * math.log(2), -good * math.log(100), bad * math.log(2), 0.0])
    assert result.ratio.tolist() == pytest.approx([4, 4, 4, 0.5])


@pytest.mark.parametrize(("far", "weight"), [(800.0, 0.0), (-800.0, math.exp(2 * -19 + 3 * (1 - math.exp(-19))))])
def test_vespo_weighs_a_response_far_off_by_nothing(far, weight):
    # A token's log r is at most 20, or -20 at least, and so is the sum with the other's, which is 1.
    logprob = torch.tensor([far, 1.0], dtype=torch.float64, requires_grad=True)
    rows = RowReducer(torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool))
    tokens = PolicyTokens(logprob, torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    vespo(tokens, rows=rows, k_pos=2.0, k_neg=3.0, lambda_pos=3.0, lambda_neg=2.0).loss.sum().backward()
    assert logprob.grad.tolist() == pytest.approx([-weight] * 2, rel=1e-9)


FIPO = {"clip_low": 0.2, "clip_high": 0.2, "half_life": 1.0, "future_low": 0.0, "future_high": 0.9, "future_safety": 10}


def test_fipo_weighs_tokens_by_what_follows():
    # Half-life 1: F of the last token of each response is its log r, of the one before it half of that besides.
    logprob, tokens, rows = two_responses([1.1, 50.0, 1.5, 0.9], [1.0, 1.0, 1.0, -1.0], active=[1, 0, 1, 1])
    result = fipo(tokens, rows=rows, **FIPO)
    result.loss.sum().backward()
    # The inactive token takes a place: 1.1 x 1.5^(1/4). The third is clipped at 1.2, the fourth weighs 1, not 0.9.
    first = 1.1 * 1.5**0.25
    expected = [-first * 1.1, -(1.5**0.5) * 1.2, -1.5 * 1.2, 0.9]
    assert result.loss.tolist() == pytest.approx(expected, rel=1e-12)
    assert logprob.grad.tolist() == pytest.approx([-first * 1.1, 0.0, 0.0, 0.9], rel=1e-12)


def test_fipo_bounds_its_weight_on_both_sides():
    _, tokens, rows = two_responses([1.0, 3.0, 0.5], [1.0, -1.0, -1.0])
    result = fipo(tokens, rows=rows, **{**FIPO, "future_low": 0.25, "future_high": 0.5})
    # F: log 3 / 2 and log 3 for the first response, log 1/2 for the second: weights 1.5, 1.5 and 0.75.
    assert result.loss.tolist() == pytest.approx([-1.5, 1.5 * 3, 0.75 * 0.8])


def test_fipo_does_not_push_tokens_far_off_any_harder():
    _, tokens, rows = two_responses([1.0, 12.0, 8.0], [1.0, -1.0, -1.0])
    result = fipo(tokens, rows=rows, **FIPO)
    assert result.loss.tolist() == pytest.approx([-1.9, 12.0, 1.9 * 8])


def test_fipo_leaves_out_responses_with_several_tokens_at_the_dual_clip():
    # Above 3 where A < 0: one token of the second response, two of the first. None of them counts in F.
    logprob, tokens, rows = two_responses([1.1, 4.0, 5.0, 4.0], [1.0, -1.0, -1.0, -1.0])
    result = fipo(tokens, rows=rows, **FIPO, dual_clip=3.0)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([0, 0, 0, 3.0]) and not logprob.grad.any()
    assert result.clipped.tolist() == [True] * 4
    _, tokens, rows = two_responses([1.1, 4.0, 1.1, 4.0], [1.0, -1.0, 1.0, -1.0])
    result = fipo(tokens, rows=rows, **FIPO, dual_clip=3.0)
    assert result.loss.tolist() == pytest.approx([-1.1 * 1.1 * 1.1**0.25, 3 * 1.1**0.5, -1.1 * 1.1, 3.0])


def test_the_off_policy_mask_takes_bad_tokens_of_responses_that_became_unlikely():
    # Means of -log r: (log 2 + 0) / 2 without the inactive token, and -log 2.
    _, tokens, rows = two_responses([0.5, 1e-9, 1.0, 2.0], [-1.0, -1.0, 1.0, -1.0], active=[1, 0, 1, 1])
    bound = math.log(2) / 2
    assert off_policy(tokens, rows=rows, delta=bound * 0.99).tolist() == [True, True, False, False]
    assert not off_policy(tokens, rows=rows, delta=bound * 1.01).any()
