"""Advantages without a critic: numbers worked out by hand, and what their papers say must hold for all of them."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.algorithms.advantages import (
    gdpo_advantages,
    gpg_advantages,
    grpo_advantages,
    grpo_passk_advantages,
    maxrl_advantages,
    opmd_advantages,
    opo_advantages,
    passk_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
    whitened,
)
from dagrl.data.batch import Column


def mask_of(*lengths: int) -> Column:
    return Column.ragged([np.ones(length) for length in lengths], "float32")


def rows(column: Column) -> list[list[float]]:
    return [column[row].tolist() for row in range(len(column))]


def reinforce_plus_plus(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    """Of one signature with the others; it does not look at groups."""
    return whitened(reinforce_plus_plus_advantages(rewards, mask), mask)


def reinforce_plus_plus_baseline(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    return whitened(reinforce_plus_plus_baseline_advantages(rewards, groups, mask), mask)


def dr_grpo(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    return grpo_advantages(rewards, groups, mask, normalize_by_std=False)


def opmd_by_mean(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    return opmd_advantages(rewards, groups, mask, baseline="mean", tau=1.0)


def opmd_by_logavgexp(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    return opmd_advantages(rewards, groups, mask, baseline="logavgexp", tau=0.5)


def maxrl(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    """Its rewards are 0 or more; here -5 to 5 and NaN."""
    return maxrl_advantages(rewards + 5, groups, mask)


def grpo_by_batch(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    return grpo_advantages(rewards, groups, mask, normalize_by_std="batch")


def gdpo(rewards: np.ndarray, groups: np.ndarray, mask: Column) -> Column:
    both = {"right": rewards, "large": np.abs(rewards)}
    return whitened(gdpo_advantages(both, {"right": 1.0, "large": 0.5}, groups, mask), mask)


OF_GROUPS = (grpo_advantages, dr_grpo, rloo_advantages, opo_advantages, opmd_by_mean, opmd_by_logavgexp, maxrl)
OF_BATCHES = (reinforce_plus_plus, reinforce_plus_plus_baseline, gdpo)
ALL = (*OF_GROUPS, *OF_BATCHES, gpg_advantages, grpo_by_batch, grpo_passk_advantages)


def test_rewards_are_compared_within_their_group():
    # Rewards 1, 0, 0, 1: mean 1/2, deviations 1/2, sample variance 4 * 1/4 / 3 = 1/3, so 1/2 * sqrt(3) = 0.8660254.
    # Rewards 3, 5 of the other group: mean 4, deviations 1, sample variance 2, so 1 / sqrt(2) = 0.7071068.
    rewards, groups = np.array([1.0, 3.0, 0.0, 0.0, 5.0, 1.0]), np.array([7, 9, 7, 7, 9, 7])
    advantages = grpo_advantages(rewards, groups, mask_of(2, 1, 1, 1, 1, 1))
    a, b = 0.8660254, 0.7071068
    expected = [[a, a], [-b], [-a], [-a], [b], [a]]
    assert [pytest.approx(row, abs=1e-7) for row in expected] == rows(advantages)
    assert advantages.values.dtype == np.float32


def test_without_std_the_deviation_itself_is_the_advantage():
    # Mean of 1, 2, 6 is 3.
    advantages = grpo_advantages(np.array([1.0, 2.0, 6.0]), np.zeros(3), mask_of(1, 2, 1), normalize_by_std=False)
    assert rows(advantages) == [[-2.0], [-1.0, -1.0], [3.0]]


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_groups_without_a_difference_say_nothing(normalize_by_std):
    # 0.1 has no exact mean in binary; a group of one is constant; the last group differs by an ulp of float32.
    rewards = np.array([0.1, 0.1, 0.1, 4.0, 1.0, np.nextafter(np.float32(1), np.float32(2))])
    advantages = grpo_advantages(
        rewards, np.array([0, 0, 0, 1, 2, 2]), mask_of(1, 1, 1, 1, 1, 1), normalize_by_std=normalize_by_std
    )
    assert advantages.values.tolist() == [0.0] * 6


def test_small_rewards_are_not_taken_for_rounding():
    # Mean 2e-9, deviations 1e-9, sample std sqrt(2) 1e-9.
    advantages = grpo_advantages(np.array([1e-9, 3e-9]), np.zeros(2), mask_of(1, 1))
    assert advantages.values.tolist() == pytest.approx([-0.7071068, 0.7071068], abs=1e-7)


def test_tokens_outside_the_mask_get_no_advantage():
    mask = Column.ragged([[1, 0, 1], [], [0]], "float32")
    advantages = grpo_advantages(np.array([2.0, 0.0, 1.0]), np.zeros(3), mask, normalize_by_std=False)
    assert rows(advantages) == [[1.0, 0.0, 1.0], [], [0.0]]


@pytest.mark.parametrize("estimate", ALL)
def test_no_rows_give_no_advantages(estimate):
    assert len(estimate(np.zeros(0), np.zeros(0, dtype=np.int64), Column.ragged([], "float32"))) == 0


@pytest.mark.parametrize("estimate", ALL)
def test_a_reward_that_is_no_number_is_refused(estimate):
    with pytest.raises(ValueError, match=r"a (reward|`right`) is nan"):
        estimate(np.array([1.0, np.nan]), np.zeros(2), mask_of(1, 1))


@pytest.mark.parametrize("estimate", ALL)
def test_equal_rewards_and_responses_without_tokens_to_train_on_say_nothing(estimate):
    # Equal up to float32's rounding.
    rewards = np.array([0.1, np.float32(0.1), 0.1, 4.0])
    mask = Column.ragged([[1, 1], [1], [1, 1, 1], [0, 0]], "float32")
    assert estimate(rewards, np.array([0, 0, 0, 1]), mask).values.tolist() == [0.0] * 8


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-1000, 1000)), min_size=1, max_size=20),
    st.sampled_from([-40, -1, 3]),
    st.sampled_from([0.25, 8.0]),
)
def test_shift_and_scale_of_rewards_do_not_matter(samples, shift, scale):
    groups, rewards = np.array([group for group, _ in samples]), np.array([float(reward) for _, reward in samples])
    mask = mask_of(*[1] * len(samples))
    moved = grpo_advantages(rewards * scale + shift, groups, mask)
    assert moved.values == pytest.approx(grpo_advantages(rewards, groups, mask).values, abs=1e-6)


def test_rloo_compares_with_the_others():
    # 1 against the mean 1/3 of 0, 0, 1; 0 against the mean 2/3 of 1, 0, 1. In the pair, 3 against 5. One is alone.
    rewards, groups = np.array([1.0, 3.0, 0.0, 0.0, 5.0, 1.0, 8.0]), np.array([7, 9, 7, 7, 9, 7, 5])
    advantages = rloo_advantages(rewards, groups, mask_of(2, 1, 1, 1, 1, 1, 1))
    assert advantages.values.tolist() == pytest.approx([2 / 3, 2 / 3, -2, -2 / 3, -2 / 3, 2, 2 / 3, 0], abs=1e-7)


def test_opo_weighs_the_baseline_by_length():
    # Lengths 1 and 3: baseline (1 * 1 + 3 * 0) / 4. The other group counts only tokens in the mask, 2 and 1:
    # baseline (2 * 6 + 1 * 3) / 3 = 5.
    rewards, groups = np.array([1.0, 0.0, 6.0, 3.0]), np.array([0, 0, 1, 1])
    mask = Column.ragged([[1], [1, 1, 1], [1, 0, 1], [1]], "float32")
    advantages = opo_advantages(rewards, groups, mask)
    assert rows(advantages) == [[0.75], [-0.25] * 3, [1.0, 0.0, 1.0], [-2.0]]


def test_reinforce_plus_plus_whitens_all_tokens_of_the_batch():
    # Tokens 1, 0, 0, 0, one masked: mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4, so 3/4 and -1/4 over 1/2.
    mask = Column.ragged([[1], [1, 1, 0, 1]], "float32")
    advantages = reinforce_plus_plus(np.array([1.0, 0.0]), np.zeros(2), mask)
    assert rows(advantages) == [[1.5], [-0.5, -0.5, 0.0, -0.5]]


def test_reinforce_plus_plus_charges_a_token_for_what_comes_after_it():
    # Returns 3 - (1 + 2), 3 - 2 | 1 - 0: 0, 1, 1 with mean 2/3 and sample variance (4 + 1 + 1) / 9 / 2 = 1/3.
    charges = Column.ragged([[1.0, 2.0], [0.0]], "float64")
    mask = mask_of(2, 1)
    advantages = whitened(reinforce_plus_plus_advantages(np.array([3.0, 1.0]), mask, charges), mask)
    assert advantages.values.tolist() == pytest.approx([-1.1547005, 0.5773503, 0.5773503], abs=1e-7)


def test_the_baseline_form_whitens_deviations_from_the_group():
    # Deviations 1 and -1, and twice 0 for equal rewards: mean 0, sample variance 2/3.
    rewards, groups = np.array([3.0, 1.0, 10.0, 10.0]), np.array([0, 0, 1, 1])
    advantages = reinforce_plus_plus_baseline(rewards, groups, mask_of(1, 1, 1, 1))
    assert advantages.values.tolist() == pytest.approx([1.2247449, -1.2247449, 0, 0], abs=1e-7)


def test_remax_compares_with_the_likeliest_response():
    mask = Column.ragged([[1, 1], [1, 0], []], "float32")
    advantages = remax_advantages(np.array([1.0, 0.25, 3.0]), np.array([0.5, 0.5, 3.0]), mask)
    assert rows(advantages) == [[0.5, 0.5], [-0.25, 0.0], []]
    for rewards in ([np.inf, 0.0], [0.0, np.nan]):
        with pytest.raises(ValueError, match="a reward is"):
            remax_advantages(np.array(rewards), np.array(rewards[::-1]), mask_of(1, 1))


def test_remax_charges_a_token_for_itself_and_what_comes_after_it():
    # 1 - 0.5 less 0.5 | 0.4, 0.3 | 0.3, and 0.25 - 0.5 less -0.25; the token of the environment is not charged.
    mask = Column.ragged([[1, 1, 0, 1], [1], []], "float32")
    charges = Column.ragged([[0.1, 0.1, 0.0, 0.3], [-0.25], []], "float64")
    advantages = remax_advantages(np.array([1.0, 0.25, 3.0]), np.array([0.5, 0.5, 3.0]), mask, charges)
    assert advantages.values.tolist() == pytest.approx([0.0, 0.1, 0.0, 0.2, 0.0], abs=1e-7)
    assert advantages.lengths.tolist() == [4, 1, 0]


@given(st.integers(0, 1000))
def test_remax_penalties_equal_a_backward_loop(seed):
    """verl's form: the response's reward on its last token, less each token's charge, added up from the end."""
    random = np.random.default_rng(seed)
    mask = Column.ragged([random.integers(0, 2, size).tolist() for size in random.integers(1, 6, 3)], "float32")
    rewards, baseline = random.normal(size=(2, 3))
    charges = Column(random.normal(size=len(mask.values)) * mask.values, mask.offsets)
    advantages = remax_advantages(rewards, baseline, mask, charges)
    for row in range(3):
        to_come, expected = rewards[row], []
        for charge, counts in zip(charges[row][::-1], mask[row][::-1], strict=True):
            to_come -= charge
            expected.insert(0, counts * (to_come - baseline[row]))
        assert advantages[row].tolist() == pytest.approx(expected, abs=1e-6)


def test_mirror_descent_compares_with_the_mean_or_with_the_soft_maximum():
    # log((e + 1) / 2) = 0.6201145; with tau 2: 2 log((e^(1/2) + 1) / 2) = 0.5618596. The second group has no
    # difference; of a reward of 1000 exp() would be infinite: 0.25 log((e^-4 + 1) / 2) = -0.1687493 below it.
    rewards, groups = np.array([1.0, 0.0, 0.1, 0.1]), np.array([0, 0, 1, 1])
    soft = opmd_advantages(rewards, groups, mask_of(1, 1, 1, 1), baseline="logavgexp", tau=1.0)
    assert soft.values.tolist() == pytest.approx([0.3798855, -0.6201145, 0, 0], abs=1e-7)
    softer = opmd_advantages(rewards, groups, mask_of(1, 1, 1, 1), baseline="logavgexp", tau=2.0)
    assert softer.values.tolist() == pytest.approx([0.4381404, -0.5618596, 0, 0], abs=1e-7)
    high = opmd_advantages(np.array([1000.0, 999.0]), np.zeros(2), mask_of(1, 1), baseline="logavgexp", tau=0.25)
    assert high.values.tolist() == pytest.approx([0.1687493, -0.8312507], abs=1e-6)
    assert opmd_by_mean(rewards, groups, mask_of(1, 1, 1, 1)).values.tolist() == [0.5, -0.5, 0, 0]


def test_gpg_makes_up_for_groups_without_signal():
    # Deviations -1 and 1, half of the responses say nothing: twice that. A group of one says nothing either.
    rewards, groups = np.array([1.0, 3.0, 5.0, 8.0]), np.array([0, 0, 1, 2])
    assert gpg_advantages(rewards, groups, mask_of(1, 1, 1, 1)).values.tolist() == [-2, 2, 0, 0]


@st.composite
def batches(draw):
    """Rewards, groups and masks of some rows."""
    row = st.tuples(st.integers(-5, 5), st.integers(0, 2), st.lists(st.integers(0, 1), max_size=4))
    drawn = draw(st.lists(row, min_size=1, max_size=12))
    rewards, groups, mask = zip(*drawn, strict=True)
    return np.array(rewards, dtype=float), np.array(groups), Column.ragged(mask, "float32")


@pytest.mark.parametrize("estimate", ALL)
@given(batches(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(estimate, batch, random):
    rewards, groups, mask = batch
    order = np.array(random.sample(range(len(rewards)), len(rewards)))
    moved = estimate(rewards[order], groups[order], mask.take(order))
    assert moved.values == pytest.approx(estimate(rewards, groups, mask).take(order).values, abs=1e-6)


@pytest.mark.parametrize("estimate", OF_GROUPS)
@given(batches())
def test_a_group_is_judged_alone(estimate, batch):
    rewards, groups, mask = batch
    whole = estimate(rewards, groups, mask)
    for group in set(groups.tolist()):
        chosen = np.flatnonzero(groups == group)
        alone = estimate(rewards[chosen], groups[chosen], mask.take(chosen))
        assert alone.values == pytest.approx(whole.take(chosen).values, abs=1e-6)


@pytest.mark.parametrize("estimate", OF_BATCHES)
@given(batches())
def test_whitened_advantages_have_mean_0_and_deviation_1_over_tokens(estimate, batch):
    rewards, groups, mask = batch
    advantages = estimate(rewards, groups, mask).values
    active = advantages[mask.values > 0].astype(np.float64)
    assert not advantages[mask.values == 0].any()
    if active.any():
        assert active.sum() == pytest.approx(0, abs=1e-5)
        assert (active**2).sum() == pytest.approx(len(active) - 1, rel=1e-5)


@given(batches())
def test_rloo_is_the_reward_less_the_mean_of_the_others(batch):
    rewards, groups, mask = batch
    advantages = rloo_advantages(rewards, groups, mask)
    for row in range(len(rewards)):
        others = [rewards[other] for other in range(len(rewards)) if other != row and groups[other] == groups[row]]
        expected = rewards[row] - sum(others) / len(others) if others else 0.0
        assert advantages[row].tolist() == pytest.approx((expected * mask[row]).tolist(), abs=1e-6)


@given(batches())
def test_opo_has_the_baseline_of_least_variance(batch):
    # Of all baselines b, sum of l (r - b)^2 is least at the one whose advantages add up to 0 over the group's tokens.
    rewards, groups, mask = batch
    advantages = opo_advantages(rewards, groups, mask)
    for group in set(groups.tolist()):
        tokens = advantages.take(np.flatnonzero(groups == group)).values
        assert tokens.sum() == pytest.approx(0, abs=1e-5)


@given(batches(), st.sampled_from([0.25, 1.0, 4.0]))
def test_the_soft_maximum_is_the_groups_worth_at_mirror_descents_optimum(batch, tau):
    # Its optimum gives response i, of n alike before, the probability exp(r_i / tau) / sum of exp(r_j / tau): there
    # every A_i is tau log(n p_i), so nothing is left to gain.
    rewards, groups, _ = batch
    mask = mask_of(*[1] * len(rewards))
    advantages = opmd_advantages(rewards, groups, mask, baseline="logavgexp", tau=tau)
    for row, reward in enumerate(rewards):
        group = [rewards[other] for other in range(len(rewards)) if groups[other] == groups[row]]
        probability = 1 / sum(math.exp((other - reward) / tau) for other in group)
        assert advantages.values[row] == pytest.approx(tau * math.log(len(group) * probability), abs=1e-5)


@given(batches())
def test_the_hotter_mirror_descent_the_nearer_is_the_soft_maximum_to_the_mean(batch):
    rewards, groups, mask = batch
    soft = opmd_advantages(rewards, groups, mask, baseline="logavgexp", tau=1e6)
    assert soft.values == pytest.approx(opmd_by_mean(rewards, groups, mask).values, abs=1e-4)


@given(batches())
def test_gpg_has_the_gradient_that_a_batch_of_telling_groups_alone_would_have(batch):
    """Averaged over the batch, scaled-up advantages weigh as deviations averaged over the groups that say anything."""
    rewards, groups, _ = batch
    mask = mask_of(*[1] * len(rewards))
    advantages = gpg_advantages(rewards, groups, mask).values
    telling = [
        row
        for row in range(len(rewards))
        if len({rewards[other] for other in np.flatnonzero(groups == groups[row])}) > 1
    ]
    expected = np.zeros(len(rewards))
    for row in telling:
        expected[row] = (rewards[row] - np.mean(rewards[groups == groups[row]])) / len(telling)
    assert advantages / len(rewards) == pytest.approx(expected, abs=1e-6)


def test_maxrl_divides_by_the_groups_mean():
    # Mean 1/4: deviations 3/4 and -1/4, times 4. Mean 2 of 1 and 3. A group of zeros has no mean to divide by.
    rewards, groups = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 3.0, 0.0, 0.0]), np.array([0, 0, 0, 0, 1, 1, 2, 2])
    advantages = maxrl_advantages(rewards, groups, mask_of(*[1] * 8))
    assert advantages.values.tolist() == [3, -1, -1, -1, -0.5, 0.5, 0, 0]


@given(st.integers(1, 6), st.integers(0, 6))
def test_maxrl_weighs_right_responses_by_the_inverse_of_their_rate(n, right):
    """The gradient of the log of the success rate: each right response weighs 1 / (rate n), up to a baseline."""
    rewards = np.array([1.0] * min(right, n) + [0.0] * (n - min(right, n)))
    advantages = maxrl_advantages(rewards, np.zeros(n), mask_of(*[1] * n)).values
    rate = rewards.mean()
    if 0 < rate < 1:
        assert advantages == pytest.approx(rewards / rate - 1, abs=1e-6)
    else:
        assert not advantages.any()


def test_the_deviation_may_be_that_of_the_batch():
    # Rewards 0, 2, 5, 5: mean 3, sample variance (9 + 1 + 4 + 4) / 3 = 6. Deviations: -1, 1, 0, 0.
    rewards, groups = np.array([0.0, 2.0, 5.0, 5.0]), np.array([0, 0, 1, 1])
    advantages = grpo_by_batch(rewards, groups, mask_of(1, 1, 1, 1))
    assert advantages.values.tolist() == pytest.approx([-(6**-0.5), 6**-0.5, 0, 0], abs=1e-7)
    # TRL's scale_rewards: batch, with 1e-4 beside the deviation.
    there = [(each - mean) / (np.std(rewards, ddof=1) + 1e-4) for each, mean in zip(rewards, (1, 1, 5, 5), strict=True)]
    assert advantages.values.tolist() == pytest.approx(there, abs=1e-4)


def test_gdpo_compares_each_reward_by_itself():
    # The first reward has deviations 1/2 and sample deviation 1 / sqrt(2), the second 50 and 50 sqrt(2): both count
    # as 1 / sqrt(2). With weights 1 and 1/2 the responses have 1.5, -1.5, and 0.5, -0.5 in units of 1 / sqrt(2).
    rewards = {"right": np.array([1.0, 0.0, 1.0, 0.0]), "long": np.array([100.0, 0.0, 0.0, 100.0])}
    mask = mask_of(1, 1, 1, 1)
    summed = gdpo_advantages(rewards, {"right": 1.0, "long": 0.5}, np.array([0, 0, 1, 1]), mask)
    assert summed.values.tolist() == pytest.approx([each / 2**0.5 for each in (1.5, -1.5, 0.5, -0.5)])
    # Mean 0, sample variance (2.25 + 2.25 + 0.25 + 0.25) / 2 / 3 = 5/6.
    assert whitened(summed, mask).values.tolist() == pytest.approx(
        [each / 2**0.5 / (5 / 6) ** 0.5 for each in (1.5, -1.5, 0.5, -0.5)]
    )


def test_a_reward_of_gdpo_that_is_no_number_is_named():
    rewards = {"right": np.ones(2), "polite": np.array([1.0, np.inf])}
    with pytest.raises(ValueError, match="a `polite` is inf"):
        gdpo_advantages(rewards, {"right": 1.0, "polite": 1.0}, np.zeros(2), mask_of(1, 1))


@given(st.integers(0, 1000))
def test_gdpo_is_verls_sum_of_normalized_rewards(seed):
    random = np.random.default_rng(seed)
    lengths, groups = random.integers(1, 5, 6), np.array([0, 0, 1, 1, 1, 2])
    rewards = {name: random.integers(0, 4, 6).astype(float) for name in ("a", "b", "c")}
    weights = {"a": 1.0, "b": 0.25, "c": -2.0}
    mask = mask_of(*lengths)
    sums = []
    for row, group in enumerate(groups):
        total = 0.0
        for name, weight in weights.items():
            others = [rewards[name][other] for other in range(6) if groups[other] == group]
            if len(others) > 1:
                total += weight * (rewards[name][row] - np.mean(others)) / (np.std(others, ddof=1) + 1e-6)
        sums.append(total)
    tokens = [total for total, length in zip(sums, lengths, strict=True) for _ in range(length)]
    variance = np.var(tokens, ddof=1)
    found = whitened(gdpo_advantages(rewards, weights, groups, mask), mask).values
    if variance > 1e-6:
        expected = [(each - np.mean(tokens)) / (variance + 1e-8) ** 0.5 for each in tokens]
        assert found == pytest.approx(expected, abs=1e-4)


def test_pass_at_k_rewards_sets_of_responses():
    # One of four is right, sets of two: 3 of the 6 sets have it. rho = 1/2, deviation 1/2. Right: (1/2) / (1/2) = 1.
    # A wrong one is in three sets, of which one has the right one: 1/3 - 1/2 = -1/6, divided by 1/2.
    advantages = passk_advantages(np.array([0.0, 1, 0, 0]), np.zeros(4), mask_of(1, 2, 1, 1), k=2)
    third = pytest.approx(-1 / 3)
    assert rows(advantages) == [[third], [1.0, 1.0], [third], [third]]


@given(st.lists(st.integers(0, 1), min_size=1, max_size=7), st.integers(1, 4))
def test_pass_at_k_advantages_are_means_over_all_sets(right, k):
    """All sets of k written out: each is compared with the mean of all, and a response has the mean of its sets."""
    sets = list(itertools.combinations(range(len(right)), k))
    found = passk_advantages(np.array(right, dtype=float), np.zeros(len(right)), mask_of(*[1] * len(right)), k=k)
    best = [max(right[each] for each in members) for members in sets]
    if not sets or np.std(best) == 0:
        assert not found.values.any()
        return
    for row in range(len(right)):
        own = [
            (reward - np.mean(best)) / np.std(best)
            for reward, members in zip(best, sets, strict=True)
            if row in members
        ]
        assert found.values[row] == pytest.approx(np.mean(own), abs=1e-6)


@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 12))
def test_pass_at_k_is_the_authors_formula(n, right, k):
    c = min(right, n)
    rewards = np.array([1.0] * c + [0.0] * (n - c))
    found = passk_advantages(rewards, np.zeros(n), mask_of(*[1] * n), k=k).values
    if k > n:
        assert not found.any()
        return
    rho = 1 - math.comb(n - c, k) / math.comb(n, k)
    sigma = math.sqrt(rho * (1 - rho)) + 1e-6
    expected = [(1 - rho) / sigma] * c
    if c < n:
        expected += [(1 - rho - math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)) / sigma] * (n - c)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_best_response_alone_has_its_lead():
    # 5 leads 3 by 2. The sample deviation of 1, 5, 3 is 2. Of two best ones neither leads, and one alone has no rival.
    rewards, groups = np.array([1.0, 5.0, 3.0, 4.0, 4.0, 7.0]), np.array([0, 0, 0, 1, 1, 2])
    mask = mask_of(1, 1, 1, 1, 1, 1)
    assert grpo_passk_advantages(rewards, groups, mask).values.tolist() == [0, 1, 0, 0, 0, 0]
    found = grpo_passk_advantages(rewards, groups, mask, normalize_by_std=False)
    assert found.values.tolist() == [0, 2, 0, 0, 0, 0]


@given(batches(), st.booleans())
def test_the_lead_is_that_of_verl(batch, normalize_by_std):
    rewards, groups, _ = batch
    mask = mask_of(*[1] * len(rewards))
    expected = np.zeros(len(rewards))
    for group in set(groups.tolist()):
        members = np.flatnonzero(groups == group)
        if len(members) < 2:
            continue
        highest, second = sorted(rewards[members], reverse=True)[:2]
        lead = (highest - second) / (np.std(rewards[members], ddof=1) + 1e-6 if normalize_by_std else 1.0)
        expected[members[rewards[members] == highest][0]] = lead
    found = grpo_passk_advantages(rewards, groups, mask, normalize_by_std=normalize_by_std).values
    assert found == pytest.approx(expected, abs=1e-4)
