"""What an advantage node says about lengths, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from dagrl.ops.advantage import shaped_rewards
from dagrl.ops.trajectories import with_lengths


@pytest.fixture
def batch(bench):
    """A group of three: lengths 1, 2 and 3 of 4; the second is wrong."""
    rows = bench.batch([0, 1, 2], group_id=[7, 7, 7], reward=[1, 0, 1], response_mask=[[1], [1, 1], [1, 0, 1]])
    return with_lengths(rows, rows, bench.context("advantage"))


def node(bench, **options):
    nodes = {"advantage": {"op": "advantage", "estimator": "grpo", **options}}
    return bench.context("advantage", nodes=nodes).node


def test_without_options_for_lengths_rewards_do_not_change(bench, batch) -> None:
    rewards, stats = shaped_rewards(node(bench), batch, longest=4)
    assert (rewards.tolist(), stats) == ([1, 0, 1], {})


def test_shorter_responses_get_more(bench, batch) -> None:
    # 1/2, 0 and -1/2, twice.
    rewards, stats = shaped_rewards(node(bench, length_reward={"coef": 2.0}), batch, longest=4)
    assert rewards.tolist() == [2, 0, 0]
    assert (stats["reward/length"].low, stats["reward/length"].high) == (-1, 1)


def test_the_pass_threshold_can_be_set(bench, batch) -> None:
    # With all of them wrong, the shortest gets nothing.
    rewards, _ = shaped_rewards(node(bench, length_reward={"right_above": 1.0}), batch, longest=4)
    assert rewards.tolist() == [1, 0, 0.5]


def test_the_cosine_reward_takes_the_place_of_the_nodes_own(bench, batch) -> None:
    # Of 4 tokens: 1 right (1 + cos(pi/4)) / 2 = 0.8535534 of the way, 2 wrong half of it, 3 right 0.1464466.
    rewards, stats = shaped_rewards(node(bench, cosine_reward={}), batch, longest=4)
    assert rewards.tolist() == pytest.approx([1.8535534, -5.0, 1.1464466], abs=1e-6)
    assert stats["reward/cosine"].mean == pytest.approx(-0.6666667, abs=1e-6)
    options = {"right": [1.0, 0.5], "wrong": [0.0, 0.0], "exceeded": -3.0}
    rewards, _ = shaped_rewards(node(bench, cosine_reward=options), batch, longest=3)
    # 1 of 3: (1 + cos(pi/3)) / 2 = 3/4.
    assert rewards.tolist() == pytest.approx([0.875, 0.0, -3.0])


def test_penalties_add_up(bench, batch) -> None:
    # Longest 4, buffer 2: two tokens are free, three lose half a point.
    options = {"length_reward": {}, "overlong_buffer": {"len": 2}}
    rewards, stats = shaped_rewards(node(bench, **options), batch, longest=4)
    assert rewards.tolist() == [1.5, 0, 0]
    assert stats["reward/overlong"].low == -0.5
