"""The differences that docs/algorithms.md states: other frameworks' formulas, written down here, beside dagrl's.

Each is a scalar formula in plain Python. Where the table says that settings make the two equal, they must be; where it
says that they differ, they must differ.
"""

import math

import numpy as np
import pytest
import torch

from dagrl.algorithms.advantages import gpg_advantages, grpo_advantages, reinforce_plus_plus_advantages, whitened
from dagrl.algorithms.aggregation import token_weights
from dagrl.algorithms.covariance import beyond_moment, squared_log_ratios
from dagrl.algorithms.dpo import preference_loss
from dagrl.algorithms.losses import PolicyLoss, PolicyTokens, cispo, dro, m2po, ppo_clip
from dagrl.algorithms.response_losses import opmd_kimi, topr
from dagrl.algorithms.rows import RowReducer
from dagrl.algorithms.token_returns import gae_advantages
from dagrl.data.batch import Column

RATIOS = [0.05, 0.5, 0.95, 1.1, 1.5, 7.0]


def weights_of(result: PolicyLoss, logprob: torch.Tensor, advantage: float) -> list[float]:
    """The factor of -A grad log p of each token."""
    result.loss.sum().backward()
    return [each / -advantage for each in logprob.grad.tolist()]


def weights_of_cispo(advantage: float) -> list[float]:
    logprob = torch.tensor(RATIOS, dtype=torch.float64).log().requires_grad_()
    result = cispo(PolicyTokens(logprob, torch.zeros_like(logprob), torch.full_like(logprob, advantage)), clip_high=0.2)
    return weights_of(result, logprob, advantage)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(("low", "same"), [(1.0, True), (0.2, False), (0.1, False)])
def test_cispo_is_that_of_verl_slime_and_roll_without_their_lower_bound(advantage, low, same):
    there = [min(max(ratio, 1 - low), 1.2) for ratio in RATIOS]
    assert (weights_of_cispo(advantage) == pytest.approx(there)) == same


@pytest.mark.parametrize(("advantage", "same"), [(2.0, False), (-2.0, True)])
def test_cispo_of_trinity_lets_go_of_what_is_likely_enough(advantage, same):
    there = [0.0 if advantage > 0 and ratio > 1.2 else min(ratio, 1.2) for ratio in RATIOS]
    assert (weights_of_cispo(advantage) == pytest.approx(there)) == same


@pytest.mark.parametrize(("ratios", "same"), [([0.3], True), ([4.0, 0.125], False), ([0.5, 0.5], False)])
def test_topr_weighs_responses_where_roll_and_trinity_weigh_tokens(ratios, same):
    logprob = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    rows = RowReducer(torch.zeros(len(ratios), dtype=torch.int64), torch.ones(len(ratios)).bool())
    result = topr(PolicyTokens(logprob, torch.zeros_like(logprob), torch.full_like(logprob, -2.0)), rows=rows)
    found = weights_of(result, logprob, -2.0)
    assert found == pytest.approx([min(math.prod(ratios), 1.0)] * len(ratios))
    assert (found == pytest.approx([min(ratio, 1.0) for ratio in ratios])) == same


@pytest.mark.parametrize(("ratios", "same"), [([0.3], True), ([4.0, 0.125], False), ([2.0, 2.0], False)])
def test_mirror_descent_squares_responses_where_roll_squares_tokens(ratios, same):
    logprob = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    rows = RowReducer(torch.zeros(len(ratios), dtype=torch.int64), torch.ones(len(ratios)).bool())
    result = opmd_kimi(
        PolicyTokens(logprob, torch.zeros_like(logprob), torch.full_like(logprob, 3.0)), rows=rows, tau=0.1
    )
    result.loss.sum().backward()
    logs = [math.log(ratio) for ratio in ratios]
    here = (-3 * sum(logs) + 0.05 * sum(logs) ** 2, [-3 + 0.1 * sum(logs)] * len(ratios))
    there = (-3 * sum(logs) + 0.05 * sum(each**2 for each in logs), [-3 + 0.1 * each for each in logs])
    assert result.loss.sum().item() == pytest.approx(here[0])
    assert logprob.grad.tolist() == pytest.approx(here[1])
    assert (logprob.grad.tolist() == pytest.approx(there[1])) == same
    of_tokens = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    result = dro(PolicyTokens(of_tokens, torch.zeros_like(of_tokens), torch.full_like(of_tokens, 3.0)), tau=0.1)
    result.loss.sum().backward()
    assert (result.loss.sum().item(), of_tokens.grad.tolist()) == (pytest.approx(there[0]), pytest.approx(there[1]))


@pytest.mark.parametrize(
    ("rewards", "here", "there"),
    [
        # Two groups of two. All of both tell something, half of the rewards are 0.
        ([1.0, 0.0, 0.0, 1.0], 1.0, 2.0),
        # The second group is all right: it tells nothing, and verl counts its rewards.
        ([1.0, 0.0, 1.0, 1.0], 2.0, 4 / 3),
        # The second group is all wrong.
        ([1.0, 0.0, 0.0, 0.0], 2.0, 4.0),
        # No reward is 0 and both groups tell something: the same.
        ([1.0, 2.0, 1.0, 3.0], 1.0, 1.0),
    ],
)
def test_gpg_counts_groups_with_a_signal_where_verl_counts_rewards(rewards, here, there):
    rewards, groups = np.array(rewards), np.array([0, 0, 1, 1])
    mask = Column.ragged([[1]] * 4, "float32")
    deviations = rewards - np.repeat(rewards.reshape(2, 2).mean(1), 2)
    assert gpg_advantages(rewards, groups, mask).values.tolist() == pytest.approx((here * deviations).tolist())
    assert len(rewards) / np.count_nonzero(rewards) == pytest.approx(there)


def test_a_single_response_says_nothing_where_verl_takes_its_reward():
    mask = Column.ragged([[1]], "float32")
    assert grpo_advantages(np.array([3.0]), np.array([0]), mask).values.tolist() == [0.0]


@pytest.mark.parametrize("mask", [[1, 1, 1], [1, 0, 1]])
@pytest.mark.parametrize(("gamma", "same"), [(1.0, True), (0.9, False)])
def test_returns_are_not_discounted_where_verls_are(mask, gamma, same):
    # verl since 0.9: backwards, tokens outside of the mask leave what is to come as it is.
    tokens, other = Column.ragged([mask, [1]], "float32"), 0.5
    to_come, there = 0.0, []
    for reward, counts in zip([0.0, 0.0, 2.0][::-1], mask[::-1], strict=True):
        following = reward + gamma * to_come
        there.insert(0, following * counts)
        to_come = following * counts + to_come * (1 - counts)
    whole = [*(each for each, counts in zip(there, mask, strict=True) if counts), other]
    expected = [(each - np.mean(whole)) / np.std(whole, ddof=1) for each in whole]
    found = whitened(reinforce_plus_plus_advantages(np.array([2.0, other]), tokens), tokens).values
    assert (found[tokens.values > 0].tolist() == pytest.approx(expected, abs=1e-6)) == same


@pytest.mark.parametrize(("lengths", "same"), [((1, 1), True), ((4, 2), False)])
def test_ipo_takes_sums_where_trl_takes_means(lengths, same):
    # TRL divides both log-ratios by the lengths of their responses.
    ratios, beta = (0.8, -0.4), 0.1
    here = preference_loss(torch.tensor(ratios[0] - ratios[1], dtype=torch.float64), "ipo", beta=beta).item()
    there = (ratios[0] / lengths[0] - ratios[1] / lengths[1] - 1 / (2 * beta)) ** 2
    assert (here == pytest.approx(there)) == same


def test_a_dual_clip_is_in_the_clip_fraction_where_verl_has_two():
    # verl: pg_clipfrac of the bounds around 1, and pg_clipfrac_lower of the dual clip.
    ratio = torch.tensor([0.5, 0.9, 1.5, 4.0, 1.5, 4.0, 0.5], dtype=torch.float64)
    advantage = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    found = ppo_clip(PolicyTokens(ratio.log(), torch.zeros(7), advantage), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    free, bounded = -advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)
    two = bounded > free, (torch.maximum(free, bounded) > -advantage * 3.0) & (advantage < 0)
    assert found.clipped.sum() == two[0].sum() + two[1].sum() == 4


@pytest.mark.parametrize(("mask", "same"), [([1, 1, 1], True), ([1, 0, 1], False)])
def test_values_step_over_a_tools_tokens_where_roll_takes_them_for_steps(mask, same):
    rewards, values, gamma, lam = [0.0, 0.0, 1.0], [0.2, 0.9, 0.4], 0.9, 0.8
    following, advantage, there = 0.0, 0.0, []
    for reward, value, counts in zip(rewards[::-1], values[::-1], mask[::-1], strict=True):
        value *= counts
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        there.insert(0, advantage * counts)
    columns = (Column.ragged([each], "float64") for each in (rewards, values, mask))
    found, _ = gae_advantages(*columns, discount=gamma, trace=lam)
    assert (found.values.tolist() == pytest.approx(there, abs=1e-6)) == same


def test_dr_grpos_sum_is_divided_by_the_responses_too():
    # verl: each response's sum over the longest length, averaged over the two; ROLL and siiRL leave the 2 out.
    mask = Column.ragged([[1, 1, 1], [1]], "float32")
    losses = np.array([1.0, 2.0, 3.0, 4.0])
    weights, normalizer = token_weights(mask, "seq-mean-token-sum-norm", 8)
    assert (weights.values * losses).sum() / normalizer == pytest.approx((6 / 8 + 4 / 8) / 2)


def m2po_gradient(log_ratios: list[float], advantages: list[float], bound: float = 0.04) -> list[float]:
    logprob = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
    tokens = PolicyTokens(logprob, torch.zeros_like(logprob), torch.tensor(advantages, dtype=torch.float64))
    columns = [
        Column(np.array(each), np.array([0, len(each)])) for each in (log_ratios, [0.0] * len(log_ratios), advantages)
    ]
    squares = squared_log_ratios(*columns, Column(np.ones(len(log_ratios)), columns[0].offsets))
    m2po(tokens, clip_cov_mask=torch.from_numpy(beyond_moment(squares, bound))).loss.sum().backward()
    return logprob.grad.tolist()


@pytest.mark.parametrize(("last", "same"), [(0.35, False), (0.5, True)])
def test_m2po_masks_where_its_authors_code_clips_at_a_ratio_of_one_and_a_half(last, same):
    # The mean square of 0.1, 0.2 and the last is above 0.04, that of 0.1 and 0.2 is not: their bound is exp(0.2) =
    # 1.22, raised to 1.5, which exp(0.35) = 1.42 does not reach.
    log_ratios = [0.1, 0.2, last]
    there = [-math.exp(each) if math.exp(each) < max(math.exp(0.2), 1.5) else 0.0 for each in log_ratios]
    assert (m2po_gradient(log_ratios, [1.0] * 3) == pytest.approx(there)) == same


def test_m2po_keeps_tokens_that_moved_against_their_advantage_where_areal_masks_them():
    # AReaL drops the largest squares of all tokens, until the mean of the rest is below the bound: 0.35 alone.
    assert m2po_gradient([0.1, -0.2, 0.35, 0.1], [1.0, 1.0, -1.0, 1.0])[2] == pytest.approx(math.exp(0.35))
    assert m2po_gradient([0.1, -0.2, 0.35, 0.1], [1.0, -1.0, 1.0, 1.0])[2] == 0.0


def test_m2po_may_mask_every_token_where_areal_keeps_one():
    assert m2po_gradient([0.5, -0.9], [1.0, -1.0]) == [0.0, 0.0]
