"""Imitation, alone and beside a policy's own samples: numbers by hand, and the same loss however the batch is cut."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.algorithms.objective import PolicyObjective
from dagrl.algorithms.sft import MixedObjective, ObservedObjective, SftObjective
from dagrl.config.schema import LossSpec
from dagrl.data.batch import Batch, Column


def responses(*probabilities, **columns):
    """Responses whose tokens have these probabilities for the policy."""
    rows = len(probabilities)
    ragged = {"policy": [np.log(row) for row in probabilities]} | {
        name: values for name, values in columns.items() if name != "is_expert"
    }
    found = {name: Column.ragged(values, "float64") for name, values in ragged.items()}
    found["response_tokens"] = Column.ragged([np.zeros(len(row)) for row in probabilities], "int64")
    found["response_mask"] = Column.ragged([np.ones(len(row)) for row in probabilities], "float32")
    found["is_expert"] = Column(np.array(columns.get("is_expert", [0.0] * rows), dtype=np.float32))
    return Batch(np.arange(rows), found)


TWO = ([0.5, 0.25, 0.5], [0.125])


@pytest.mark.parametrize(
    ("aggregation", "loss", "told", "gradients"),
    [
        # Seven halvings over four tokens.
        ("token-mean", 7 / 4, 7 / 4, {0: [-1 / 4] * 3, 1: [-1 / 4]}),
        ("seq-mean-token-sum", 7 / 2, 7 / 4, {0: [-1 / 2] * 3, 1: [-1 / 2]}),
        ("seq-mean-token-mean", (4 / 3 + 3) / 2, (4 / 3 + 3) / 2, {0: [-1 / 6] * 3, 1: [-1 / 2]}),
        ("seq-mean-token-sum-norm", 7 / 2 / 8, 7 / 4, {0: [-1 / 16] * 3, 1: [-1 / 16]}),
    ],
)
def test_the_likelihood_of_responses(aggregation, loss, told, gradients, accumulated):
    found, each, metrics = accumulated([responses(*TWO)], SftObjective(aggregation, longest_response=8))
    assert found == pytest.approx(loss * math.log(2), rel=1e-6)
    assert {row: pytest.approx(values, rel=1e-6) for row, values in gradients.items()} == each
    assert metrics["loss/sft"] == pytest.approx(told * math.log(2), rel=1e-6), "a mean, whatever the scale of the loss"


MIXED = responses(
    *TWO,
    [0.5, 0.5],
    [0.25],
    advantage=[[1.0, 1.0, 1.0], [-1.0], [9.0, 9.0], [9.0]],
    rollout_logprob=[np.log([0.5, 0.25, 0.5]), np.log([0.125]), [-80.0, 80.0], [-80.0]],
    is_expert=[0, 0, 1, 1],
)
POLICY = PolicyObjective(LossSpec(policy="reinforce"), 1.0, ("advantage", "rollout_logprob"), needs_entropy=False)


def test_each_part_is_averaged_over_its_own_rows(accumulated):
    loss, gradients, metrics = accumulated([MIXED], MixedObjective(POLICY, mu=0.25))
    # REINFORCE over four tokens: -(1 * (ln 1/2 + ln 1/4 + ln 1/2) - 1 * ln 1/8) / 4; NLL: (ln 2 + ln 4) / 2.
    policy, expert = (4 - 3) / 4 * math.log(2), 1.5 * math.log(2)
    assert loss == pytest.approx(0.75 * policy + 0.25 * expert, rel=1e-6)
    assert gradients[0] == pytest.approx([-0.75 / 4] * 3, rel=1e-6)
    assert gradients[1] == pytest.approx([0.75 / 4], rel=1e-6)
    assert gradients[2] == pytest.approx([-0.25 / 4] * 2, rel=1e-6)
    assert gradients[3] == pytest.approx([-0.25 / 2], rel=1e-6)
    assert metrics["loss/policy"] == pytest.approx(policy, rel=1e-6)
    assert metrics["loss/sft"] == pytest.approx(expert, rel=1e-6)
    assert metrics["mismatch/logprob_diff"] == pytest.approx(0.0, abs=1e-12), "the expert's rows were never sampled"


@pytest.mark.parametrize(("kept", "loss"), [([0, 1], 0.75 * 0.25), ([2, 3], 0.25 * 1.5)])
def test_a_mini_batch_may_lack_either(kept, loss, accumulated):
    found, _, _ = accumulated([MIXED.take(np.array(kept))], MixedObjective(POLICY, mu=0.25))
    assert found == pytest.approx(loss * math.log(2), rel=1e-6)


@given(st.permutations(range(4)), st.lists(st.integers(0, 4), max_size=3))
def test_the_mixed_loss_does_not_depend_on_how_rows_are_dealt(accumulated, order, cuts):
    parts = [MIXED.take(piece) for piece in np.split(np.array(order), sorted(cuts)) if len(piece)]
    loss, gradients, metrics = accumulated(parts, MixedObjective(POLICY, mu=0.4))
    expected, expected_gradients, told = accumulated([MIXED], MixedObjective(POLICY, mu=0.4))
    assert loss == pytest.approx(expected, rel=1e-6)
    assert metrics == pytest.approx(told, rel=1e-6, abs=1e-9)
    for row, gradient in expected_gradients.items():
        assert gradients[row] == pytest.approx(gradient, rel=1e-6)


# Turns of the policy, an answer between them, and one at the end; a prefix that the policy did not write; a response
# that is not trained on.
OBSERVED = responses(
    [0.5, 0.25, 0.125, 0.5, 0.0625],
    [0.125, 0.5, 0.25],
    [0.5, 0.25],
    advantage=[[1.0, 9.0, 9.0, -2.0, 9.0], [9.0, 1.0, 9.0], [9.0, 9.0]],
    rollout_logprob=[[0.0] * 5, [0.0] * 3, [0.0] * 2],
).with_columns(
    {
        "response_mask": Column.ragged([[1, 0, 0, 1, 0], [0, 1, 0], [0, 0]], "float32"),
        "token_turn": Column.ragged([[1, 0, 0, 2, 0], [0, 1, 0], [1, 0]], "int16"),
    }
)


def test_answers_of_tools_are_learned_in_the_mean_over_themselves(accumulated):
    loss, gradients, metrics = accumulated([OBSERVED], ObservedObjective(POLICY, 0.1))
    # REINFORCE over three tokens: -(ln 1/2 - 2 ln 1/2 + ln 1/2) / 3; NLL of (1/4, 1/8, 1/16, 1/4): 11 halvings over 4.
    assert loss == pytest.approx(0.1 * 11 / 4 * math.log(2), rel=1e-6, abs=1e-9)
    assert gradients[0] == pytest.approx([-1 / 3, -0.025, -0.025, 2 / 3, -0.025], rel=1e-6)
    assert gradients[1] == pytest.approx([0, -1 / 3, -0.025], rel=1e-6)
    assert gradients[2] == [0, 0]
    assert metrics["loss/observations"] == pytest.approx(11 / 4 * math.log(2), rel=1e-6)
    assert metrics["loss/policy"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_answers_of_tools_weigh_as_in_echo_of_prime_rl(accumulated, seed):
    random, alpha = np.random.default_rng(seed), 0.3
    turns = [[1, *random.choice([0, 2], random.integers(1, 9))] for _ in range(4)]
    probabilities = [random.uniform(0.1, 0.9, len(row)).tolist() for row in turns]
    advantages = [random.normal(size=len(row)) for row in turns]
    batch = responses(*probabilities, advantage=advantages, rollout_logprob=[np.zeros(len(row)) for row in turns])
    batch = batch.with_columns(
        {
            "response_mask": Column.ragged([[float(turn > 0) for turn in row] for row in turns], "float32"),
            "token_turn": Column.ragged(turns, "int16"),
        }
    )
    loss, gradients, _ = accumulated([batch], ObservedObjective(POLICY, alpha))
    # One weight per token: each of the two terms is divided by its number of tokens.
    turn, probability, advantage = (np.concatenate(rows) for rows in (turns, probabilities, advantages))
    slope = np.where(turn > 0, -advantage / max((turn > 0).sum(), 1), -alpha / max((turn == 0).sum(), 1))
    assert np.concatenate([gradients[row] for row in range(4)]) == pytest.approx(slope, rel=1e-6)
    assert loss == pytest.approx((slope * np.log(probability)).sum(), rel=1e-6)


def test_a_step_without_answers_has_the_policys_loss(accumulated):
    alone = OBSERVED.with_columns({"token_turn": Column.ragged([[1, 1, 1, 2, 2], [1, 1, 1], [1, 1]], "int16")})
    loss, gradients, _ = accumulated([alone], ObservedObjective(POLICY, 0.1))
    expected, policys, _ = accumulated([alone], POLICY)
    assert (loss, gradients) == (pytest.approx(expected), policys)


@given(st.permutations(range(3)), st.lists(st.integers(0, 3), max_size=3))
def test_the_loss_of_answers_does_not_depend_on_how_rows_are_dealt(accumulated, order, cuts):
    parts = [OBSERVED.take(piece) for piece in np.split(np.array(order), sorted(cuts)) if len(piece)]
    loss, gradients, metrics = accumulated(parts, ObservedObjective(POLICY, 0.4))
    expected, expected_gradients, told = accumulated([OBSERVED], ObservedObjective(POLICY, 0.4))
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert metrics == pytest.approx(told, rel=1e-6, abs=1e-9, nan_ok=True)
    for row, gradient in expected_gradients.items():
        assert gradients[row] == pytest.approx(gradient, rel=1e-6)
