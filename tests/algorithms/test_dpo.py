"""Preference losses: numbers by hand, and the same loss however the pairs are dealt to micro-batches.

Probabilities are chosen so that log-ratios are whole multiples of log 2.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dagrl.algorithms.dpo import DpoObjective, preference_loss
from dagrl.backends.base import ResponseTokens
from dagrl.data.batch import Batch, Column

LN2 = math.log(2)


@pytest.mark.parametrize(
    ("form", "smoothing", "beta", "difference", "loss", "gradient"),
    [
        # s(0.5 ln 4) = s(ln 2) = 2/3: loss -ln(2/3), gradient -beta (1 - 2/3).
        ("sigmoid", 0.0, 0.5, 2 * LN2, math.log(1.5), -0.5 / 3),
        # Nothing learned yet: s(0) = 1/2.
        ("sigmoid", 0.0, 0.1, 0.0, LN2, -0.05),
        # A quarter of the labels wrong: 3/4 ln(3/2) + 1/4 ln 3; the gradient is beta (s - 3/4).
        ("sigmoid", 0.25, 0.5, 2 * LN2, 0.75 * math.log(1.5) + 0.25 * math.log(3), 0.5 * (2 / 3 - 0.75)),
        # At 3 s(beta h) = 3/4, which is where smoothed labels pull to: no gradient.
        ("sigmoid", 0.25, 1.0, math.log(3), 0.75 * math.log(4 / 3) + 0.25 * math.log(4), 0.0),
        # (2 - 1 / (2 * 0.5))**2 = 1, gradient 2 (2 - 1).
        ("ipo", 0.0, 0.5, 2.0, 1.0, 2.0),
        ("ipo", 0.0, 0.1, 5.0, 0.0, 0.0),
        ("hinge", 0.0, 0.5, 1.0, 0.5, -0.5),
        ("hinge", 0.0, 0.5, -2.0, 2.0, -0.5),
        ("hinge", 0.0, 0.5, 2.5, 0.0, 0.0),
    ],
)
def test_the_loss_of_a_pair(form, smoothing, beta, difference, loss, gradient):
    given_difference = torch.tensor([difference], dtype=torch.float64, requires_grad=True)
    result = preference_loss(given_difference, form, beta=beta, label_smoothing=smoothing)
    result.sum().backward()
    assert result.item() == pytest.approx(loss, abs=1e-12)
    assert given_difference.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_a_pair_far_from_the_labels_has_a_finite_loss():
    result = preference_loss(torch.tensor([-1e4, 1e4], dtype=torch.float64), "sigmoid", beta=1.0)
    assert result.tolist() == [1e4, 0.0]


@pytest.mark.parametrize("form", ["sigmoid", "ipo", "hinge"])
def test_a_pair_that_is_no_number_cannot_be_trained_on(form):
    tokens = ResponseTokens(
        logprob=torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True),
        entropy=None,
        weight=torch.full((4,), 0.5, dtype=torch.float64),
        columns={"group_id": torch.tensor([0, 0, 1, 1]), "ref_logprob": torch.tensor([-1.0, math.nan, -1.0, -1.0])},
        row=torch.arange(4),
        totals=(2.0,),
    )
    loss, _ = DpoObjective(form, beta=0.5)(tokens)
    loss.backward()
    assert math.isnan(loss.item())
    assert not tokens.logprob.grad.isfinite().any()


def pairs_of(*rows: tuple[list[float], list[float]], first_group: int = 0) -> Batch:
    """Rows in pairs: probabilities of each token for the policy (kept as tokens) and for the reference."""
    return Batch(
        np.arange(len(rows)) + 2 * first_group,
        {
            "response_tokens": Column.ragged([np.zeros(len(policy)) for policy, _ in rows], "int64"),
            "policy": Column.ragged([np.log(policy) for policy, _ in rows], "float64"),
            "ref_logprob": Column.ragged([np.log(reference) for _, reference in rows], "float64"),
            "group_id": Column(np.arange(len(rows)) // 2 + first_group),
        },
    )


FIRST = (([0.5, 0.5], [0.25, 0.5]), ([0.2], [0.4]))
"""Log-ratios ln 2 of the chosen response, of two tokens, and -ln 2 of the rejected one."""
SECOND = (([0.1], [0.2]), ([0.5, 0.5, 0.25], [0.5, 0.5, 0.25]))
"""Log-ratios -ln 2 and 0: the policy prefers the rejected one."""


def test_pairs_count_alike_whatever_their_lengths(accumulated):
    loss, gradients, metrics = accumulated([pairs_of(*FIRST, *SECOND)], DpoObjective(beta=0.5))
    # -ln s(ln 2) = ln 1.5, and -ln s(-ln 2 / 2) = ln(1 + sqrt 2); averaged.
    assert loss == pytest.approx((math.log(1.5) + math.log(1 + math.sqrt(2))) / 2, abs=1e-12)
    # Half of -0.5 * 1/3, the same for each token of the chosen response, and against it for the rejected one's.
    assert gradients[0] == pytest.approx([-1 / 12, -1 / 12])
    assert gradients[1] == pytest.approx([1 / 12])
    assert gradients[3] == pytest.approx([0.25 * (1 - 1 / (1 + math.sqrt(2)))] * 3)
    assert metrics["loss/dpo"] == pytest.approx(loss)
    assert metrics["dpo/accuracy"] == 0.5
    assert metrics["dpo/margin"] == pytest.approx(0.5 * (2 - 1) * LN2 / 2)
    assert metrics["dpo/chosen_reward"] == pytest.approx(0.0, abs=1e-15)
    assert metrics["dpo/rejected_reward"] == pytest.approx(-0.25 * LN2)


def test_the_likelihood_of_chosen_responses_is_reported_and_added_on_request(accumulated):
    plain, without, metrics = accumulated([pairs_of(*FIRST)], DpoObjective(beta=0.5))
    loss, gradients, told = accumulated([pairs_of(*FIRST)], DpoObjective(beta=0.5, sft_coef=0.2))
    # Two tokens of probability 1/2.
    assert metrics["loss/sft"] == told["loss/sft"] == pytest.approx(LN2)
    assert loss == pytest.approx(plain + 0.2 * LN2)
    assert gradients[0] == pytest.approx([each - 0.1 for each in without[0]])
    assert gradients[1] == pytest.approx(without[1])


@given(st.integers(0, 1000), st.permutations(range(5)), st.lists(st.integers(0, 5), max_size=3))
def test_the_loss_does_not_depend_on_how_pairs_are_dealt(accumulated, seed, order, cuts):
    random = np.random.default_rng(seed)
    rows = [tuple(random.uniform(0.05, 1.0, (2, random.integers(1, 5))).tolist()) for _ in range(10)]
    whole = pairs_of(*rows)
    parts = [
        whole.take(np.array([row for pair in piece for row in (2 * pair, 2 * pair + 1)], dtype=np.int64))
        for piece in np.split(np.array(order), sorted(cuts))
    ]
    objective = DpoObjective("ipo", beta=0.3, sft_coef=0.5)
    loss, gradients, metrics = accumulated([part for part in parts if len(part)], objective)
    expected, expected_gradients, told = accumulated([whole], objective)
    assert loss == pytest.approx(expected, rel=1e-9)
    assert metrics == pytest.approx(told, rel=1e-9)
    for row, gradient in expected_gradients.items():
        assert gradients[row] == pytest.approx(gradient, rel=1e-9)


def test_half_a_pair_is_refused():
    with pytest.raises(AssertionError, match="consecutive"):
        DpoObjective(beta=0.1).token_weights(pairs_of(*FIRST, *SECOND).take(np.array([0, 1, 2])))
    with pytest.raises(AssertionError, match="consecutive"):
        DpoObjective(beta=0.1).token_weights(pairs_of(*FIRST, *SECOND).take(np.array([0, 2, 1, 3])))
