"""Corrections on numbers by hand: weights, what is rejected, and what becomes of the loss."""

import math
from typing import Any, get_args

import pytest
import torch

from dagrl.algorithms.objective import PolicyObjective
from dagrl.algorithms.rollout_correction import correct, correction_metrics, importance_weights, rejected, vetoed
from dagrl.algorithms.rows import RowReducer
from dagrl.backends.base import ResponseTokens
from dagrl.config.schema import DivergenceCriterion, LossSpec, PolicyForm, RatioCriterion, RolloutCorrectionSpec
from dagrl.data.tally import read_tallies

# Three responses; the last token of the second does not count, and its ratio is absurd.
RATIOS = [0.5, 3.0, 0.25, 0.2, 1e9, 1.5, 1.5, 1.5]
ROW = [0, 0, 1, 1, 1, 2, 2, 2]
ACTIVE = [1, 1, 1, 1, 0, 1, 1, 1]
# Products of the active ones: 1.5, 0.05 and 3.375; geometric means 1.2247, 0.2236 and 1.5.


def packed() -> tuple[torch.Tensor, RowReducer]:
    log_ratio = torch.tensor(RATIOS, dtype=torch.float64).log()
    return log_ratio, RowReducer(torch.tensor(ROW), torch.tensor(ACTIVE).bool())


def test_weights_of_tokens_are_cut_from_above():
    log_ratio, rows = packed()
    found = importance_weights(log_ratio, rows, level="token", upper=2.0)
    assert found.weight[rows.active].tolist() == pytest.approx([0.5, 2.0, 0.25, 0.2, 1.5, 1.5, 1.5], abs=1e-15)
    assert found.truncated[rows.active].tolist() == [False, True, False, False, False, False, False]
    assert not found.masked.any()


def test_with_a_lower_bound_tokens_outside_weigh_nothing():
    log_ratio, rows = packed()
    found = importance_weights(log_ratio, rows, level="token", upper=2.0, lower=0.22)
    assert found.weight[rows.active].tolist() == pytest.approx([0.5, 0, 0.25, 0, 1.5, 1.5, 1.5], abs=1e-15)
    assert found.masked[rows.active].tolist() == [False, True, False, True, False, False, False]
    assert not found.truncated.any()


def test_weights_of_responses_are_products_over_the_tokens_that_count():
    log_ratio, rows = packed()
    found = importance_weights(log_ratio, rows, level="sequence", upper=2.0)
    assert found.weight.tolist() == pytest.approx([1.5] * 2 + [0.05] * 3 + [2.0] * 3, abs=1e-14)
    assert found.truncated.tolist() == [False] * 5 + [True] * 3
    masked = importance_weights(log_ratio, rows, level="sequence", upper=2.0, lower=0.5)
    assert masked.weight.tolist() == pytest.approx([1.5] * 2 + [0.0] * 6, abs=1e-14)


# k2 = log(r)^2 / 2 and k3 = r - 1 - log r of the tokens:
#   r    0.5      3        0.25     0.2      1.5
#   k2   0.240    0.603    0.961    1.295    0.0822
#   k3   0.193    0.901    0.636    0.809    0.0945
# By response: k2 sums 0.844, 2.256, 0.247, means 0.422, 1.128, 0.0822; k3 sums 1.095, 1.446, 0.284, means 0.547, 0.723,
# 0.0945, and the largest are k2 0.603, 1.295, 0.0822 and k3 0.901, 0.809, 0.0945.
@pytest.mark.parametrize(
    ("criterion", "upper", "lower", "out"),
    [
        ("token", 2.0, None, [0, 1, 1, 1, 0, 0, 0, 0]),
        ("token", 4.0, 0.22, [0, 0, 0, 1, 0, 0, 0, 0]),
        ("sequence", 2.0, None, [0, 0, 1, 1, 0, 1, 1, 1]),
        ("sequence", 2.0, 0.04, [0, 0, 0, 0, 0, 1, 1, 1]),
        ("geometric", 2.0, None, [0, 0, 1, 1, 0, 0, 0, 0]),
        ("geometric", 1.4, 0.2, [0, 0, 0, 0, 0, 1, 1, 1]),
        ("token_k2", 0.9, None, [0, 0, 1, 1, 0, 0, 0, 0]),
        ("token_k3", 0.8, None, [0, 1, 0, 1, 0, 0, 0, 0]),
        ("seq_sum_k2", 1.0, None, [0, 0, 1, 1, 0, 0, 0, 0]),
        ("seq_sum_k3", 1.0, None, [1, 1, 1, 1, 0, 0, 0, 0]),
        ("seq_mean_k2", 0.08, None, [1, 1, 1, 1, 0, 1, 1, 1]),
        ("seq_mean_k3", 0.6, None, [0, 0, 1, 1, 0, 0, 0, 0]),
        ("seq_max_k2", 1.0, None, [0, 0, 1, 1, 0, 0, 0, 0]),
        ("seq_max_k3", 0.85, None, [1, 1, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_samples_that_the_criteria_reject(criterion, upper, lower, out):
    log_ratio, rows = packed()
    rollout = torch.full_like(log_ratio, -30.0)
    found = rejected(rollout + log_ratio, rollout, rows, criterion=criterion, upper=upper, lower=lower)
    assert found.int().tolist() == out


def test_a_token_that_the_trainer_would_never_draw_takes_its_response_along():
    log_ratio, rows = packed()
    assert vetoed(log_ratio, rows, threshold=0.3).int().tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert not vetoed(log_ratio, rows, threshold=0.19).any()


def test_ratios_too_large_for_a_float_stay_finite():
    log_ratio = torch.tensor([800.0, 800.0, -900.0, -900.0])
    rows = RowReducer(torch.tensor([0, 0, 1, 1]), torch.ones(4).bool())
    for level in ("token", "sequence"):
        found = importance_weights(log_ratio, rows, level=level, upper=2.0)
        assert found.weight.tolist() == pytest.approx([2.0, 2.0, 0.0, 0.0], abs=1e-8)
        assert found.truncated.tolist() == [True, True, False, False]
    for criterion in ("token", "sequence", "geometric", "seq_sum_k3", "seq_max_k2"):
        assert rejected(log_ratio, torch.zeros(4), rows, criterion=criterion, upper=2.0).all()


@pytest.mark.parametrize("criterion", [*get_args(RatioCriterion), *get_args(DivergenceCriterion)])
@pytest.mark.parametrize("difference", [50.0, 88.0, 800.0, math.inf])
def test_infinite_differences_are_rejected(criterion, difference):
    # The second token of the first response; the other response has no such token.
    rows = RowReducer(torch.tensor([0, 0, 1]), torch.ones(3).bool())
    far, near = torch.tensor([-1.0, -difference, -1.0]), torch.tensor([-1.0, 0.0, -1.0])
    # A probability changes by 1 at most, and by half of that in the mean over the two.
    upper = 0.4 if criterion.endswith("tv") else 5.0
    for trainer, rollout in ((far, near), (near, far)):
        found = rejected(trainer, rollout, rows, criterion=criterion, upper=upper).tolist()
        assert found == ([False, True, False] if criterion.startswith("token") else [True, True, False])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("criterion", [*get_args(RatioCriterion), *get_args(DivergenceCriterion)])
def test_a_token_whose_probability_the_generator_does_not_know_is_rejected(criterion, wrong):
    # Its ratio is in no bounds. The same for all criteria on responses, whatever the other tokens are.
    rows = RowReducer(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 1, 0]).bool())
    rollout = torch.tensor([-1.0, wrong, -1.0, wrong])
    found = rejected(torch.full((4,), -1.0), rollout, rows, criterion=criterion, upper=5.0).tolist()
    assert found == ([False, True] if criterion.startswith("token") else [True, True]) + [False, False]


def test_a_response_with_such_a_token_is_vetoed_and_has_no_weight():
    rows = RowReducer(torch.tensor([0, 0, 1]), torch.ones(3).bool())
    log_ratio = torch.tensor([0.0, math.nan, 0.0])
    assert vetoed(log_ratio, rows, threshold=1e-4).tolist() == [True, True, False]
    for level, expected in (("token", [1.0, 0.0, 1.0]), ("sequence", [0.0, 0.0, 1.0])):
        for lower in (None, 0.5):
            found = importance_weights(log_ratio, rows, level=level, upper=2.0, lower=lower)
            assert found.weight.tolist() == expected
            assert found.masked.tolist() == [not weight for weight in expected]


def test_a_log_ratio_counts_up_to_20_as_in_verl():
    # k2 of a token is 20^2 / 2 = 200 at most, its log r 20: so a sum of 100 and -30 is 20 - 20.
    rows = RowReducer(torch.zeros(2, dtype=torch.int64), torch.ones(2).bool())
    trainer, rollout = torch.tensor([100.0, -30.0]), torch.zeros(2)
    assert not rejected(trainer, rollout, rows, criterion="token_k2", upper=200.0).any()
    assert rejected(trainer, rollout, rows, criterion="token_k2", upper=199.0).all()
    assert not rejected(trainer, rollout, rows, criterion="sequence", upper=1.01).any()


def test_metrics_say_what_was_done():
    log_ratio, rows = packed()
    spec = RolloutCorrectionSpec(
        rollout_is="token", rollout_rs="token", rollout_rs_threshold=2.0, rollout_token_veto_threshold=0.3
    )
    found = read_tallies([correction_metrics(correct(spec, log_ratio, torch.zeros(8), rows), rows)])
    weight = found["correction/weight"]
    # (0.5 + 2 + 0.25 + 0.2 + 3 * 1.5) / 7
    assert (weight.mean, weight.high) == (pytest.approx(7.45 / 7), 2.0)
    assert {name: stat.mean for name, stat in found.items() if name != "correction/weight"} == {
        "correction/truncated_fraction": pytest.approx(1 / 7),
        "correction/masked_fraction": 0.0,
        # One token of the first response, all of the second.
        "correction/rejected_fraction": pytest.approx(3 / 7),
        "correction/rejected_responses": pytest.approx(2 / 3),
        "correction/vetoed_responses": pytest.approx(1 / 3),
    }


def test_only_what_is_asked_for_is_reported():
    log_ratio, rows = packed()
    spec = RolloutCorrectionSpec(rollout_token_veto_threshold=1e-4)
    assert set(correction_metrics(correct(spec, log_ratio, torch.zeros(8), rows), rows)) == {
        "correction/vetoed_responses"
    }


def four_tokens(*, totals: tuple[float, ...] = (4.0,), **columns: list[float]) -> ResponseTokens:
    """Two responses of two tokens, probability 1/2 each now, weights 1/4, entropy 1."""
    return ResponseTokens(
        logprob=torch.full((4,), math.log(0.5), dtype=torch.float64).requires_grad_(),
        entropy=torch.ones(4, dtype=torch.float64),
        weight=torch.full((4,), 0.25, dtype=torch.float64),
        columns={name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()},
        row=torch.tensor([0, 0, 1, 1]),
        totals=totals,
    )


ADVANTAGE = [1.0, 1.0, -2.0, -2.0]
# Drawn with probabilities 1/2, 1/4, 1/8, 1/2: ratios 1, 2, 4 and 1; of the responses 2 and 4.
ROLLOUT = [math.log(each) for each in (0.5, 0.25, 0.125, 0.5)]


def loss_of(correction: dict, loss: dict | None = None, *, totals=(4.0,), old_is_rollout=False, **columns):
    columns = {"advantage": ADVANTAGE, "rollout_logprob": ROLLOUT, **columns}
    spec = RolloutCorrectionSpec(**correction) if correction else None
    objective = PolicyObjective(LossSpec(**(loss or {})), 1.0, columns, correction=spec, old_is_rollout=old_is_rollout)
    tokens = four_tokens(totals=totals, **columns)
    loss, metrics = objective(tokens)
    loss.backward()
    return loss.item(), tokens.logprob.grad.tolist(), read_tallies([metrics])


def test_weights_multiply_the_policy_loss_and_its_gradient():
    # On policy the loss of a token is -A and its gradient too, each a quarter: weights 1, 2, 2 and 1.
    loss, gradient, metrics = loss_of({"rollout_is": "token"})
    assert gradient == pytest.approx([-0.25, -0.5, 1.0, 0.5], abs=1e-15)
    assert loss == pytest.approx(-0.25 - 0.5 + 1.0 + 0.5, abs=1e-15)
    assert metrics["loss/policy"].mean == pytest.approx(loss)


def test_divergence_and_entropy_are_not_weighted_but_leave_with_what_is_rejected():
    # The first token's k1 is log 2 at the reference's 1/4, the others' 0.
    reference = [math.log(each) for each in (0.25, 0.5, 0.5, 0.5)]
    terms = {"kl_coef": 0.4, "kl_estimator": "k1", "entropy_coef": 0.1}
    weighted, _, _ = loss_of({"rollout_is": "token"}, terms, ref_logprob=reference)
    assert weighted == pytest.approx(0.75 + 0.4 * math.log(2) / 4 - 0.1)
    # The second response is out by its product, 4: what is left is of two tokens, still in quarters.
    kept, gradient, metrics = loss_of(
        {"rollout_rs": "sequence", "rollout_rs_threshold": 3.0}, terms, ref_logprob=reference
    )
    assert kept == pytest.approx(-0.5 + 0.4 * math.log(2) / 4 - 0.1 / 2)
    assert gradient == pytest.approx([-0.25 + 0.1, -0.25 + 0.1, 0.0, 0.0], abs=1e-15)
    assert metrics["correction/rejected_fraction"].mean == 0.5
    assert metrics["entropy"].count == 4, "metrics are of all tokens"


@pytest.mark.parametrize("policy", ["ppo_clip", "gspo", "cispo", "cpgd", "reinforce"])
def test_every_policy_loss_takes_corrections(policy):
    options = {"policy": policy, "aggregation": "token-mean"}
    plain = loss_of({}, options)[1]
    weighted = loss_of({"rollout_is": "token", "rollout_is_threshold": 3.0}, options)[1]
    assert weighted == pytest.approx([1 * plain[0], 2 * plain[1], 3 * plain[2], plain[3]], abs=1e-15)
    vetoed_ = loss_of({"rollout_token_veto_threshold": 0.9}, options, rollout_logprob=[-0.7, -0.6, -0.7, -0.7])[1]
    # The first response has a token of ratio exp(log 1/2 + 0.6) = 0.91, above 0.9: nothing is out.
    assert vetoed_ == plain
    assert loss_of({"rollout_token_veto_threshold": 0.95}, options, rollout_logprob=[-0.7, -0.6, -0.7, -0.7])[1] == [
        0.0,
        0.0,
        *plain[2:],
    ]


def test_without_old_logprobs_the_current_ones_are_compared():
    current = [math.log(0.5)] * 4
    with_old = loss_of(
        {"rollout_is": "sequence", "rollout_rs": "token", "rollout_rs_threshold": 3.0}, old_logprob=current
    )
    without = loss_of({"rollout_is": "sequence", "rollout_rs": "token", "rollout_rs_threshold": 3.0})
    assert with_old == without


def test_the_old_logprobs_are_compared_not_those_that_moved():
    # Old and rollout agree: nothing to correct, although the policy has moved since.
    _, _, metrics = loss_of({"rollout_is": "token"}, old_logprob=ROLLOUT)
    assert metrics["correction/weight"].low == metrics["correction/weight"].high == 1.0
    assert metrics["mismatch/logprob_diff"].high == 0.0
    assert metrics["ratio/mean"].mean == pytest.approx(2.0)


def test_with_the_generators_logprobs_as_old_ones_the_current_ones_are_compared():
    """verl's bypass mode: PPO's ratio is that of the current policy to the generator."""
    correction = {"rollout_rs": "token", "rollout_rs_threshold": 3.0}
    _, gradient, metrics = loss_of(correction, old_logprob=ROLLOUT, old_is_rollout=True)
    assert metrics["mismatch/ratio"].high == pytest.approx(4.0)
    assert metrics["correction/rejected_fraction"].mean == 0.25
    # Ratios 1, 2 (clipped), 4 (out), 1.
    assert gradient == pytest.approx([-0.25, 0.0, 0.0, 0.5], abs=1e-15)


FORMS = [
    *({"rollout_rs": each, "rollout_rs_threshold": 5.0} for each in get_args(RatioCriterion)),
    *({"rollout_rs": each, "rollout_rs_threshold": 9.0} for each in get_args(DivergenceCriterion)),
    {"rollout_rs": ["token", "seq_mean_k3"], "rollout_rs_threshold": [5.0, 9.0]},
    {"rollout_token_veto_threshold": 1e-4},
    {"rollout_is": "token"},
    {"rollout_is": "sequence"},
    {"rollout_is": "token", "rollout_is_threshold": 5.0, "rollout_is_threshold_lower": 0.1},
    {"rollout_is": "token", "rollout_rs": "sequence", "rollout_rs_threshold": 5.0},
    {"rollout_is": "sequence", "rollout_rs": "token", "rollout_rs_threshold": 5.0},
]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("policy", ["ppo_clip", "gspo", "reinforce", "topr"])
@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("correction", FORMS)
def test_no_correction_keeps_a_token_without_a_finite_log_prob(correction, is_old, policy, wrong):
    rollout = [*ROLLOUT[:2], wrong, math.log(0.5)]
    columns = {"rollout_logprob": rollout} | ({"old_logprob": rollout} if is_old else {})
    loss, gradient, metrics = loss_of(
        correction, {"policy": policy, "clip_ratio_high": 9.0}, old_is_rollout=is_old, **columns
    )
    assert math.isfinite(loss) and all(map(math.isfinite, gradient))
    assert gradient[2] == 0 and gradient[0] < 0
    for name, stat in metrics.items():
        assert all(map(math.isfinite, (stat.mean, stat.low, stat.high))), name
    assert metrics["mismatch/unknown_fraction"].mean == 0.25
    # The other token of its response is known, and stays where nothing compares whole responses.
    alone = RolloutCorrectionSpec(**correction).is_of_tokens
    assert (gradient[3] != 0) == alone
    of_tokens = "rollout_rs" in correction and alone
    assert not of_tokens or metrics["correction/rejected_fraction"].mean == 0.25


def test_without_a_correction_such_a_token_is_trained_on_and_left_out_of_the_metrics():
    rollout = [*ROLLOUT[:3], math.nan]
    _, gradient, metrics = loss_of({}, rollout_logprob=rollout)
    assert gradient == pytest.approx([-0.25, -0.25, 0.5, 0.5])
    assert metrics["mismatch/ratio"].count == 3
    assert metrics["mismatch/ratio"].mean == pytest.approx(7 / 3)
    assert metrics["mismatch/unknown_fraction"].mean == 0.25
    assert math.isfinite(metrics["mismatch/rollout_ppl"].mean)


# Ratios 1, 2, 4 and 1, of responses 2 and 4; k3 0, 0.307, 1.614 and 0.
@pytest.mark.parametrize(
    ("criteria", "upper", "lower", "out", "by"),
    [
        (["token", "sequence"], [1.5, 2.5], None, [0, 1, 1, 1], {"token": 0.5, "sequence": 0.5}),
        (["token", "seq_max_k3"], [3.0, 0.2], [0.2, None], [1, 1, 1, 1], {"token": 0.25, "seq_max_k3": 1.0}),
        (["token", "token_k3"], 1.9, None, [0, 1, 1, 0], {"token": 0.5, "token_k3": 0.0}),
        (["token"], [1.5], [0.2], [0, 1, 1, 0], {}),
    ],
)
def test_one_of_several_criteria_suffices_to_reject(criteria, upper, lower, out, by):
    correction = {"rollout_rs": criteria, "rollout_rs_threshold": upper, "rollout_rs_threshold_lower": lower}
    _, gradient, metrics = loss_of(correction)
    assert [int(slope == 0) for slope in gradient] == out
    assert metrics["correction/rejected_fraction"].mean == sum(out) / 4
    prefix = "correction/rejected_fraction/"
    found = {name.removeprefix(prefix): stat.mean for name, stat in metrics.items() if name.startswith(prefix)}
    assert found == by


@pytest.mark.parametrize("policy", [form for form in get_args(PolicyForm) if form != "none"])
def test_the_losses_that_have_a_ratio_are_known(policy):
    """Their gradient on samples of another policy holds the ratio once already: `rollout_is` would square it.

    Two responses of a token each, u = 0.9 times as likely now as when they were drawn: the power of u in the gradient
    is 1 with a ratio or a weight, and 2 with both.
    """

    def slope(u: float, **options: Any) -> float:
        rollout = [math.log(0.5 / u)] * 2
        columns = {"advantage": [-1.0, 1.0], "rollout_logprob": rollout, "old_logprob": rollout}
        columns |= {"clip_cov_mask": [0.0, 0.0], "group_id": [0.0, 0.0]}
        # With 1 and almost 0, vespo's weight is the ratio itself.
        spec = LossSpec(policy=policy, tau=1e-6, k_neg=1.0, lambda_neg=1e-6, aggregation="token-mean")
        objective = PolicyObjective(spec, 1.0, columns, old_is_rollout=True, **options)
        values = {name: torch.tensor(each, dtype=torch.float64) for name, each in columns.items()}
        logprob = torch.full((2,), math.log(0.5), dtype=torch.float64).requires_grad_()
        weight = torch.full((2,), 0.5, dtype=torch.float64)
        tokens = ResponseTokens(logprob, torch.ones(2), weight, values, torch.tensor([0, 1]), (2.0,))
        objective(tokens)[0].backward()
        return logprob.grad[0].item()

    def power(**options: Any) -> float:
        return math.log(slope(0.9, **options) / slope(1.0, **options)) / math.log(0.9)

    has_ratio = LossSpec(policy=policy).has_ratio
    assert power() == pytest.approx(1.0 if has_ratio else 0.0, abs=0.03)
    weighted = power(correction=RolloutCorrectionSpec(rollout_is="token"))
    assert weighted == pytest.approx(2.0 if has_ratio else 1.0, abs=0.03)


@pytest.mark.parametrize(
    ("level", "mean"),
    # Tokens: (1 + 2 + 2 + 1 + 0.5) / 5. Responses: 2, 4 cut to 2, and 0.5, over 3.
    [("token", 1.3), ("sequence", 1.5)],
)
def test_normalized_weights_have_mean_one_over_all_ranks(level, mean):
    import numpy as np

    from dagrl.data.batch import Batch, Column

    correction = {"rollout_is": level, "rollout_is_batch_normalize": True}
    # The second response has a token that does not count, the last one no other.
    offsets = np.array([0, 2, 5, 6, 7])
    columns = {
        "response_mask": np.array([1, 1, 1, 1, 0, 1, 0], np.float32),
        "old_logprob": np.zeros(7),
        "rollout_logprob": -np.log([1, 2, 4, 1, 100, 0.5, 8]),
    }
    batch = Batch(np.arange(4), {name: Column(values, offsets) for name, values in columns.items()})
    objective = PolicyObjective(LossSpec(), 1.0, columns, correction=RolloutCorrectionSpec(**correction))
    parts = [objective.token_weights(batch.take(np.array(rows, dtype=np.int64)))[1] for rows in ([0, 3], [], [1, 2])]
    normalizer, total, count = (sum(each) for each in zip(*parts, strict=True))
    assert (normalizer, total / count) == (5.0, pytest.approx(mean))
    old = [math.log(0.5)] * 4
    normalized = loss_of(correction, totals=(4.0, total, count), old_logprob=old)[1]
    plain = loss_of({"rollout_is": level}, old_logprob=old)[1]
    assert normalized == pytest.approx([each / mean for each in plain])
