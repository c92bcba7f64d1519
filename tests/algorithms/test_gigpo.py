"""GiGPO by hand: episodes are compared as in GRPO, and turns with others that begin in the same state."""

from __future__ import annotations

import numpy as np
import pytest

from dagrl.algorithms.advantages import grpo_advantages
from dagrl.algorithms.gigpo import gigpo_advantages
from dagrl.data.batch import Column


def ragged(*rows: list[float], dtype: str = "float32") -> Column:
    return Column.ragged(rows, dtype)


def advantages(answers: tuple[int, int], prompts: tuple[int, int] = (1, 1), **options: float) -> list[list[float]]:
    """Two responses of two turns to these prompts, which get `answers` after the first."""
    turns = ragged([1, 1, 0, 2], [1, 0, 2, 2], dtype="int16")
    found = gigpo_advantages(
        np.array([1.0, 0.0]),
        np.array([4, 4]),
        Column((turns.values > 0).astype(np.float32), turns.offsets),
        turn_rewards=ragged([0, 0, 0, 1], [0, 0, 0, 0]),
        prompts=ragged([prompts[0]], [prompts[1]], dtype="int64"),
        tokens=ragged([5, 6, answers[0], 7], [8, answers[1], 3, 4], dtype="int64"),
        turns=turns,
        **{"discount": 0.5, "step_coef": 2.0, "normalize_by_std": False, **options},
    )
    return [found[row].tolist() for row in range(2)]


def test_turns_that_begin_alike_are_compared() -> None:
    # Episodes: 1 and 0, so +-0.5. First turns: returns 0.5 * 1 and 0, so +-0.25. Second ones: 1 and 0, so +-0.5.
    assert advantages((9, 9)) == [[1.0, 1.0, 0.0, 1.5], [-1.0, 0.0, -1.5, -1.5]]


def test_a_state_that_occurs_once_compares_nothing() -> None:
    assert advantages((9, 2)) == [[1.0, 1.0, 0.0, 0.5], [-1.0, 0.0, -0.5, -0.5]]


def test_first_turns_after_other_prompts_are_other_states() -> None:
    # As with agents, which ask the policy what they like.
    assert advantages((9, 9), prompts=(1, 2)) == [[0.5, 0.5, 0.0, 1.5], [-0.5, 0.0, -1.5, -1.5]]


def test_both_comparisons_are_scaled_alike() -> None:
    # Two values have the sample deviation |difference| / sqrt(2), so that each advantage is +-1 / sqrt(2).
    scaled = advantages((9, 9), normalize_by_std=True)
    np.testing.assert_allclose(np.abs(scaled[0]), np.array([3, 3, 0, 3]) / np.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("by_turns", [True, False])
def test_a_response_counts_once_or_as_often_as_it_has_turns(by_turns, normalize_by_std) -> None:
    """verl-agent and ROLL have a row for each turn, and take mean and deviation over a group's rows."""
    turns = ragged([1, 0, 2, 0, 3], [1], [1, 1, 0, 2], [1], dtype="int16")
    groups, rewards = np.array([0, 0, 0, 1]), np.array([1.0, 0.0, 0.5, 3.0])
    found = gigpo_advantages(
        rewards,
        groups,
        Column((turns.values > 0).astype(np.float32), turns.offsets),
        turn_rewards=ragged([0] * 5, [0], [0] * 4, [0]),
        prompts=ragged([3], [3], [3], [4], dtype="int64"),
        tokens=ragged([5, 6, 7, 8, 9], [4], [1, 2, 3, 4], [1], dtype="int64"),
        turns=turns,
        discount=1.0,
        step_coef=0.0,
        normalize_by_std=normalize_by_std,
        mean_over="turns" if by_turns else "responses",
    )
    entries = np.array([1.0, 1.0, 1.0, 0.0, 0.5, 0.5] if by_turns else [1.0, 0.0, 0.5])
    scale = entries.std(ddof=1) if normalize_by_std else 1.0
    expected = [(reward - entries.mean()) / scale for reward in rewards[:3]]
    for row, advantage in enumerate([*expected, 0.0]):
        np.testing.assert_allclose(found[row], np.where(turns[row] > 0, advantage, 0.0), rtol=1e-6, atol=1e-7)


def test_groups_do_not_share_states() -> None:
    turns = ragged([1], [1], dtype="int16")
    mask = ragged([1], [1])
    groups, rewards = np.array([0, 1]), np.array([1.0, 0.0])
    found = gigpo_advantages(
        rewards,
        groups,
        mask,
        turn_rewards=ragged([1], [0]),
        prompts=ragged([3], [3], dtype="int64"),
        tokens=ragged([1], [1], dtype="int64"),
        turns=turns,
        discount=1.0,
        step_coef=1.0,
    )
    assert found.values.tolist() == grpo_advantages(rewards, groups, mask).values.tolist() == [0, 0]


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        gigpo_advantages(
            np.array([np.nan]),
            np.array([0]),
            ragged([1]),
            turn_rewards=ragged([0]),
            prompts=ragged([3], dtype="int64"),
            tokens=ragged([1], dtype="int64"),
            turns=ragged([1], dtype="int16"),
            discount=1.0,
            step_coef=1.0,
        )
