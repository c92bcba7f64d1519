"""Log-probs that are far apart: every loss and every estimator stays within a bound, in value and in gradient."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dagrl.algorithms.dpo import preference_loss
from dagrl.algorithms.kl import kl_estimate
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
from dagrl.algorithms.own_loss import OwnLoss
from dagrl.algorithms.response_losses import fipo, gmpo, gspo, opmd_kimi, opmd_pairwise, topr, vespo
from dagrl.algorithms.rows import RowReducer
from dagrl.backends.base import ResponseTokens
from dagrl.config.schema.nodes.update import KlEstimator, PolicyForm

FARTHEST = 1000.0
"""Log-probs are within [-FARTHEST, 0]."""
LARGEST = 10.0
"""Advantages are within [-LARGEST, LARGEST]."""
ROWS = RowReducer(torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool))
"""A response of two tokens, and one of one token."""
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
FIPO = {"rows": ROWS, **CLIP, "half_life": 2.0, "future_low": 0.0, "future_high": 0.2, "future_safety": 10.0}


@dataclass(frozen=True)
class Bounded:
    """A loss, and what bounds it for these log-probs and advantages."""

    loss: Callable[..., PolicyLoss]
    value: float
    gradient: float


def clip_cov_of(tokens: PolicyTokens) -> PolicyLoss:
    return clip_cov(tokens, clip_cov_mask=torch.tensor([0, 1, 0]), **CLIP)


POLICIES = {
    "ppo_clip": Bounded(partial(ppo_clip, **CLIP), math.exp(20) * LARGEST, math.exp(20) * LARGEST),
    "ppo_clip, dual_clip": Bounded(partial(ppo_clip, **CLIP, dual_clip=3.0), 3 * LARGEST, 3 * LARGEST),
    "clip_cov": Bounded(clip_cov_of, math.exp(20) * LARGEST, math.exp(20) * LARGEST),
    "kl_cov": Bounded(
        partial(kl_cov, clip_cov_mask=torch.tensor([0, 1, 1]), kl_cov_coef=2.0),
        math.exp(20) * LARGEST + 2 * FARTHEST,
        math.exp(20) * LARGEST + 2,
    ),
    "gspo": Bounded(partial(gspo, rows=ROWS, **CLIP), math.exp(10) * LARGEST, math.exp(10) * LARGEST),
    "gmpo": Bounded(partial(gmpo, rows=ROWS, **CLIP), math.exp(20) * LARGEST, math.exp(20) * LARGEST),
    # 4 / tau times a gate below 1; r times the gate's slope is largest near r = 1.5, and below 2 there.
    "sapo": Bounded(partial(sapo, tau_pos=1.0, tau_neg=1.05), 4 * LARGEST, 2 * LARGEST),
    "topr": Bounded(partial(topr, rows=ROWS), FARTHEST * LARGEST, LARGEST),
    "cispo": Bounded(partial(cispo, clip_high=0.2), 1.2 * FARTHEST * LARGEST, 1.2 * LARGEST),
    "cpgd": Bounded(partial(cpgd, **CLIP, drift_coef=0.5), FARTHEST * (LARGEST + 0.5 * 2), LARGEST + 0.5 * 2),
    "dppo_tv": Bounded(partial(dppo_tv, **CLIP), math.exp(20) * FARTHEST * LARGEST, math.exp(20) * LARGEST),
    "dppo_tv, ratio_cap": Bounded(partial(dppo_tv, **CLIP, ratio_cap=3.0), 3 * FARTHEST * LARGEST, 3 * LARGEST),
    "dppo_kl": Bounded(partial(dppo_kl, **CLIP), math.exp(20) * FARTHEST * LARGEST, math.exp(20) * LARGEST),
    "m2po": Bounded(
        partial(m2po, clip_cov_mask=torch.tensor([0, 1, 0])), math.exp(20) * LARGEST, math.exp(20) * LARGEST
    ),
    # w^k exp(lambda (1 - w)) is largest at w = k / lambda: (2/3)^2 e and (3/2)^3 / e, both below 1.25.
    "vespo": Bounded(
        partial(vespo, rows=ROWS, k_pos=2.0, k_neg=3.0, lambda_pos=3.0, lambda_neg=2.0),
        1.25 * FARTHEST * LARGEST,
        1.25 * LARGEST,
    ),
    "fipo": Bounded(partial(fipo, **FIPO), 1.2 * math.exp(20) * LARGEST, 1.2 * math.exp(20) * LARGEST),
    "fipo, dual_clip": Bounded(partial(fipo, **FIPO, dual_clip=3.0), 1.2 * 3 * LARGEST, 1.2 * 3 * LARGEST),
    "dro": Bounded(partial(dro, tau=0.5), FARTHEST * LARGEST + FARTHEST**2 / 4, LARGEST + FARTHEST / 2),
    "reinforce": Bounded(reinforce, FARTHEST * LARGEST, LARGEST),
    "opmd": Bounded(partial(opmd, tau=1.0), FARTHEST * LARGEST, LARGEST),
    # With tau 1/2: a quarter of the square of the response's log-ratio, told to its tokens as D times each one's own.
    "opmd_kimi": Bounded(
        partial(opmd_kimi, rows=ROWS, tau=0.5), FARTHEST * LARGEST + 2 * FARTHEST**2 / 4, LARGEST + FARTHEST
    ),
    # A weight is the difference of two responses' A - tau D, halved for it is from their mean.
    "opmd_pairwise": Bounded(
        partial(opmd_pairwise, rows=ROWS, group_id=torch.zeros(3, dtype=torch.int64), tau=0.5),
        FARTHEST * (LARGEST + FARTHEST),
        LARGEST + FARTHEST,
    ),
}
ROUNDING = 1 + 1e-5

logprobs = st.lists(st.floats(-FARTHEST, 0.0, width=32), min_size=3, max_size=3)
advantages = st.lists(st.floats(-LARGEST, LARGEST, width=32), min_size=3, max_size=3)


def test_every_loss_is_here():
    assert {name.partition(",")[0] for name in POLICIES} | {"none"} == set(get_args(PolicyForm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", POLICIES)
@given(logprobs, logprobs, advantages)
@example([0.0, 0.0, 0.0], [-50.0, -88.0, -800.0], [1.0, -1.0, -1.0])
@example([-50.0, -88.0, -800.0], [0.0, 0.0, 0.0], [1.0, -1.0, 1.0])
@example([0.0, 0.0, 0.0], [-19.9, -20.1, -10.1], [-10.0, -10.0, -10.0])
def test_losses_and_gradients_are_bounded(name, dtype, now, old, advantage):
    bounded = POLICIES[name]
    logprob = torch.tensor(now, dtype=dtype, requires_grad=True)
    result = bounded.loss(PolicyTokens(logprob, torch.tensor(old, dtype=dtype), torch.tensor(advantage, dtype=dtype)))
    result.loss.sum().backward()
    assert result.loss.abs().max() <= bounded.value * ROUNDING
    assert logprob.grad.abs().max() <= bounded.gradient * ROUNDING
    assert result.ratio.max() <= math.exp(20) * ROUNDING


@pytest.mark.parametrize("name", POLICIES)
def test_nan_is_never_trained_on(name):
    """A bound must not make a number of NaN."""
    logprob = torch.tensor([math.nan, -1.0, -1.0], requires_grad=True)
    result = POLICIES[name].loss(PolicyTokens(logprob, torch.full((3,), -1.0), torch.tensor([1.0, -1.0, -1.0])))
    result.loss.sum().backward()
    assert not result.loss.isfinite().all()


ESTIMATORS = {
    # Value and gradient; that of k3 where it is 10, at log-probs 2.61 apart: e^2.61 - 1.
    "k1": (FARTHEST, 1.0),
    "k2": (FARTHEST**2 / 2, FARTHEST),
    "k3": (10.0, 12.62),
    "abs": (FARTHEST, 1.0),
    "k1+": (FARTHEST, FARTHEST),
    "k3+": (10.0, FARTHEST),
    "abs+": (FARTHEST, FARTHEST),
    "k1*": (FARTHEST * math.exp(20), (FARTHEST + 1) * math.exp(20)),
    "k2*": (FARTHEST**2 / 2 * math.exp(20), (FARTHEST**2 / 2 + FARTHEST) * math.exp(20)),
    # r |d| where r k3 is below 10: for d > 0, k3 is d^2 / 2 (1 - d / 3) at least; d < 0 gains less.
    "k3*": (10.0, 1.01 * math.sqrt(20 * math.exp(20))),
}


def test_every_estimator_is_here():
    assert set(ESTIMATORS) == set(get_args(KlEstimator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(logprobs, logprobs, logprobs)
@example([-50.0, -88.0, -800.0], [0.0, 0.0, 0.0], [-1.0, -1.0, -1.0])
@example([0.0, 0.0, 0.0], [-50.0, -88.0, -800.0], [-20.0, -30.0, -900.0])
@example([-2.6, -2.62, -11.0], [0.0, 0.0, 0.0], [-30.0, -2.0, -10.0])
def test_divergences_and_gradients_are_bounded(estimator, dtype, now, reference, old):
    value, gradient = ESTIMATORS[estimator]
    logprob = torch.tensor(now, dtype=dtype, requires_grad=True)
    estimate = kl_estimate(logprob, torch.tensor(reference, dtype=dtype), estimator, torch.tensor(old, dtype=dtype))
    estimate.sum().backward()
    assert estimate.abs().max() <= value * ROUNDING
    assert logprob.grad.abs().max() <= gradient * ROUNDING


@pytest.mark.parametrize("form", ["sigmoid", "ipo", "hinge"])
@given(st.floats(-FARTHEST, FARTHEST, width=32))
def test_preferences_are_bounded(form, difference):
    # beta 1/2: sigmoid and hinge grow as h / 2, ipo as (h - 1)^2.
    h = torch.tensor([difference], requires_grad=True)
    loss = preference_loss(h, form, beta=0.5, label_smoothing=0.1 if form == "sigmoid" else 0.0)
    loss.sum().backward()
    largest, steepest = ((FARTHEST + 1) ** 2, 2 * (FARTHEST + 1)) if form == "ipo" else (FARTHEST / 2 + 1, 0.5)
    assert loss.abs().item() <= largest * ROUNDING
    assert h.grad.abs().item() <= steepest * ROUNDING


def test_the_reported_ratio_of_an_own_loss_is_finite():
    own = OwnLoss("losses:mine", lambda tokens: -tokens["advantage"] * tokens["logprob"], {}, ("advantage",))
    tokens = ResponseTokens(
        logprob=torch.zeros(3, requires_grad=True),
        entropy=None,
        weight=torch.ones(3),
        columns={"advantage": torch.ones(3)},
        row=torch.tensor([0, 0, 1]),
    )
    result = own(tokens, {"old_logprob": torch.tensor([-1.0, -89.0, -800.0])}, ROWS)
    assert result.ratio.tolist() == pytest.approx([math.e, math.exp(20), math.exp(20)])
