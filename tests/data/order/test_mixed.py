"""Mixtures: shares stay within one prompt, or within the tokens that are under way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.data.order.mixed import Mixture, Stage, Stages

WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(0.01, 100)), min_size=1, max_size=8).filter(any)


@settings(deadline=None)
@given(weights=WEIGHTS, counts=st.lists(st.integers(0, 40), min_size=1, max_size=12))
def test_each_source_is_within_one_prompt_of_its_share_after_every_prompt(weights, counts) -> None:
    mixture = Mixture(len(weights))
    chosen = [source for count in counts for source in mixture.take(count, weights)]
    assert len(chosen) == sum(counts)
    taken = np.cumsum(np.eye(len(weights))[chosen], axis=0) if chosen else np.zeros((0, len(weights)))
    shares = np.arange(1, len(chosen) + 1)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(taken - shares).max(initial=0) < 1
    assert not taken[:, np.array(weights) == 0].any()


@pytest.mark.parametrize(("weights", "count"), [([3, 1], 8), ([1, 1, 2], 4), ([5], 3), ([1, 2, 3, 4], 20)])
def test_a_step_with_whole_shares_takes_exactly_these(weights, count) -> None:
    mixture = Mixture(len(weights))
    for _ in range(60):
        chosen = mixture.take(count, weights)
        assert [chosen.count(source) for source in range(len(weights))] == [
            count * each // sum(weights) for each in weights
        ]


@settings(deadline=None)
@given(
    first=st.lists(st.floats(0.01, 100), min_size=2, max_size=5),
    turn=st.integers(0, 60),
    draw=st.randoms(use_true_random=False),
)
def test_weights_that_change_keep_the_shares_of_all_steps(first, turn, draw) -> None:
    second = [draw.uniform(0.01, 100) for _ in first]
    mixture, wanted, taken = Mixture(len(first)), np.zeros(len(first)), np.zeros(len(first))
    for number in range(120):
        weights = np.array(first if number < turn else second)
        wanted += weights / weights.sum()
        taken[mixture.take(1, weights)] += 1
        assert np.abs(taken - wanted).max() < 2


@pytest.mark.parametrize("lag", [1, 3])
def test_shares_of_tokens_are_right_over_the_run(lag: int) -> None:
    draw = np.random.default_rng(4)
    means, weights = [20, 300, 90], [2.0, 1.0, 1.0]
    mixture, spent, open_steps = Mixture(3, by_tokens=True), np.zeros(3), []
    for _ in range(200):
        open_steps.append(mixture.take(16, weights))
        if len(open_steps) >= lag:
            for source in open_steps.pop(0):
                tokens = int(draw.integers(1, 2 * means[source]))
                spent[source] += tokens
                mixture.observe(source, tokens, weights)
    under_way = 16 * (lag + 1) * max(means)
    assert np.abs(spent - spent.sum() * np.array([0.5, 0.25, 0.25])).max() < under_way
    assert abs(spent[0] / spent.sum() - 0.5) < 0.01


def test_weights_move_linearly_between_stages_and_a_metric_ends_one() -> None:
    stages = Stages(
        [
            Stage((1.0, 0.0), until_step=2),
            Stage((0.0, 1.0), until_metric={"reward/mean": 0.8, "kl": 0.1}, move_over=3),
            Stage((1.0, 1.0)),
        ]
    )
    assert stages.metrics == {"reward/mean", "kl"}
    assert [stages.weights(step) for step in (1, 2)] == [[1, 0], [1, 0]]
    moved = [stages.weights(step) for step in (3, 4, 5, 6, 7)]
    assert moved == [[0.75, 0.25], [0.5, 0.5], [0.25, 0.75], [0, 1], [0, 1]]
    stages.observe(2, {"reward/mean": 0.9, "kl": 0.2})
    assert stages.weights(7) == [0, 1], "a step that overlaps with the stage before"
    stages.observe(4, {"reward/mean": 0.9})
    stages.observe(5, {"reward/mean": 0.7, "kl": 0.2})
    assert stages.weights(8) == [0, 1]
    stages.observe(7, {"reward/mean": 0.8, "kl": 0.1})
    resumed = Stages([Stage((1.0, 0.0), until_step=2), Stage((0.0, 1.0)), Stage((1.0, 1.0))])
    resumed.load(stages.state())
    assert stages.weights(9) == resumed.weights(9) == [1, 1]
    assert stages.weights(100) == [1, 1]
