"""Generalized advantage estimation: by hand, and against the mixture of n-step estimates that it was derived from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.algorithms.token_returns import gae_advantages, length_adaptive_traces, token_rewards
from dagrl.data.batch import Column


def column(*rows: list[float]) -> Column:
    return Column.ragged(rows, "float32")


@pytest.mark.parametrize(
    ("discount", "trace", "expected"),
    [
        # The reward to come, 1, less the value.
        (1.0, 1.0, [0.5, 0.25, 0.0]),
        # One step: 0.75 - 0.5, 1 - 0.75, 1 - 1.
        (1.0, 0.0, [0.25, 0.25, 0.0]),
        # Steps 0.375 - 0.5, 0.5 - 0.75 and 1 - 1; each with a quarter of what comes after it.
        (0.5, 0.5, [-0.1875, -0.25, 0.0]),
    ],
)
def test_three_tokens(discount, trace, expected):
    rewards, values = column([0, 0, 1]), column([0.5, 0.75, 1])
    advantages, targets = gae_advantages(rewards, values, column([1, 1, 1]), discount=discount, trace=trace)
    assert advantages.values.tolist() == expected
    assert targets.values.tolist() == np.add(expected, [0.5, 0.75, 1]).tolist()
    assert advantages.values.dtype == targets.values.dtype == np.float32


def test_tokens_outside_the_mask_are_stepped_over():
    # The value of the tool's token, 100, is seen by nobody; 0.5 is followed by 0.75.
    rewards, values = column([9, 0, 9, 1], [], [7]), column([50, 0.5, 100, 0.75], [], [7])
    advantages, targets = gae_advantages(rewards, values, column([0, 1, 0, 1], [], [0]), trace=0.0)
    assert advantages.values.tolist() == [0, 0.25, 0, 0.25, 0]
    assert targets.values.tolist() == [0, 0.75, 0, 1, 0]
    assert advantages.lengths.tolist() == [4, 0, 1]


def n_step(rewards: np.ndarray, values: np.ndarray, at: int, steps: int, discount: float) -> float:
    """Rewards of `steps` steps and the value after them, less the value now."""
    end = min(at + steps, len(rewards))
    gained = sum(discount ** (step - at) * rewards[step] for step in range(at, end))
    return gained + (discount**steps * values[end] if end < len(values) else 0.0) - values[at]


def test_a_reward_is_placed_on_the_last_trained_token():
    mask = column([1], [1, 1, 0], [], [0, 0], [1])
    found = token_rewards(np.array([5.0, 2.0, 3.0, 4.0, -1.0]), mask)
    assert found.values.tolist() == [5, 0, 2, 0, 0, 0, -1]
    assert found.lengths.tolist() == mask.lengths.tolist()


def test_token_rewards_are_part_of_the_total():
    mask = column([1, 0, 1, 1], [1, 1])
    # The 9 stands on a word of a tool's, which is no place for a reward.
    placed = column([0.5, 9, 0, 0.25], [0, 2])
    charges = column([0.125, 0, 0.25, 0], [0, 0.5])
    found = token_rewards(np.array([1.0, 2.0]), mask, placed=placed, charges=charges)
    assert found.values.tolist() == [0.375, 0, -0.25, 0.5, 0, 1.5]


@pytest.mark.parametrize("wrong", [{"rewards": np.array([np.nan])}, {"placed": column([np.inf, 0])}])
def test_a_reward_is_a_finite_number(wrong):
    with pytest.raises(ValueError, match=r"a reward is (nan|inf); rewards must be finite"):
        token_rewards(**{"rewards": np.array([1.0]), "mask": column([1, 1]), **wrong})


NUMBER = st.integers(-8, 8).map(lambda number: number / 4)


@given(
    st.lists(st.lists(st.tuples(NUMBER, NUMBER, st.booleans()), max_size=6), min_size=1, max_size=5),
    st.sampled_from([0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.5, 0.95]),
)
def test_it_is_the_geometric_mixture_of_n_step_estimates(rows, discount, trace):
    rewards, values, mask = (column(*[[token[field] for token in row] for row in rows]) for field in range(3))
    advantages, _ = gae_advantages(rewards, values, mask, discount=discount, trace=trace)
    expected = []
    for row in rows:
        reward = np.array([token[0] for token in row if token[2]])
        value = np.array([token[1] for token in row if token[2]])
        mixtures = []
        for at in range(len(reward)):
            # A = (1 - trace) sum over n >= 1 of trace^(n - 1) A^(n); from the end on, all A^(n) are the same.
            left = len(reward) - at
            mixture = (1 - trace) * sum(
                trace ** (steps - 1) * n_step(reward, value, at, steps, discount) for steps in range(1, left)
            )
            mixtures.append(mixture + trace ** (left - 1) * n_step(reward, value, at, left, discount))
        left_over = iter(mixtures)
        expected += [next(left_over) if token[2] else 0.0 for token in row]
    assert advantages.values.tolist() == pytest.approx(expected, abs=1e-5)


def test_each_row_may_have_its_own_lambda():
    rewards, values, mask = column([0, 0, 1], [0, 2]), column([0.5, 0.75, 1], [1, 3]), column([1, 1, 1], [1, 1])
    both, targets = gae_advantages(rewards, values, mask, discount=0.5, trace=np.array([0.25, 1.0]))
    for row, trace in enumerate([0.25, 1.0]):
        alone = [each.take(np.array([row])) for each in (rewards, values, mask)]
        advantage, target = gae_advantages(*alone, discount=0.5, trace=trace)
        assert both[row].tolist() == advantage.values.tolist()
        assert targets[row].tolist() == target.values.tolist()


def test_longer_responses_look_further_ahead():
    # alpha l = 0.25 * 8 = 2: 1 - 1/2; the masked token is none of the four of the second, whose alpha l is 1. The last
    # would be 1 - 1 / 0.25, below 0.
    mask = column([1] * 8, [1, 1, 0, 1, 1], [1], [0])
    assert length_adaptive_traces(mask, 0.25).tolist() == [0.5, 0, 0, 0]
