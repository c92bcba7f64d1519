"""Advantages of shards, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from dagrl.nodes.advantage import advantage
from dagrl.nodes.base import Part


@pytest.fixture
def part(bench) -> Part:
    """Two groups of two, with responses of one and two tokens."""
    batch = bench.batch(
        [4, 5, 6, 7],
        group_id=[2, 2, 3, 3],
        reward=[1, 0, 5, 5],
        response_mask=[[1], [1, 1], [1, 1], [1]],
        old_logprob=[[-1], [-1, -2], [-3, -1], [-2]],
        ref_logprob=[[-2], [-2, -3], [-3, -1], [-1]],
    )
    return Part(1, batch)


def node(**options) -> dict:
    return {"advantage": {"op": "advantage", "estimator": "grpo", **options}}


def test_rewards_are_compared_within_their_group(bench, part) -> None:
    (output,) = advantage([part], bench.context("advantage", nodes=node(normalize_by_std=False)))
    assert (output.shards, output.rows.tolist()) == ((1,), [4, 5, 6, 7])
    column = output.columns["advantage"]
    assert column.values.tolist() == [0.5, -0.5, -0.5, 0, 0, 0]
    assert column.lengths.tolist() == [1, 2, 2, 1]
    assert output.stats == {}


def test_advantages_are_divided_by_the_groups_deviation_unless_told_otherwise(bench, part) -> None:
    (output,) = advantage([part], bench.context("advantage", nodes=node()))
    # 1 and 0 have the sample's standard deviation sqrt(1 / 2).
    assert output.columns["advantage"].values.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), -(0.5**0.5), 0, 0, 0])


def test_the_divergence_is_charged_to_the_reward_before_groups_are_compared(bench, part) -> None:
    # By k1 the responses diverge by 1, 2, 0 and -1: rewards 0.9, -0.2, 5 and 5.1.
    options = node(normalize_by_std=False, kl_in_reward={"coef": 0.1})
    (output,) = advantage([part], bench.context("advantage", nodes=options))
    expected = [0.55, -0.55, -0.55, -0.05, -0.05, 0.05]
    assert output.columns["advantage"].values.tolist() == pytest.approx(expected)
    charge = output.stats["kl/in_reward"]
    assert (charge.mean, charge.high, charge.count) == (pytest.approx(0.05), pytest.approx(0.2), 4)


def test_the_estimator_of_the_charge_is_the_nodes(bench, part) -> None:
    # By k2, half the square for each token: 0.5, 1, 0 and 0.5; by k1 the last would be below 0.
    options = node(kl_in_reward={"coef": 1.0, "estimator": "k2"})
    (output,) = advantage([part], bench.context("advantage", nodes=options))
    charge = output.stats["kl/in_reward"]
    assert (charge.low, charge.high, charge.total) == (0.0, pytest.approx(1.0), pytest.approx(2.0))


def test_a_rank_without_rows_has_no_advantages(bench) -> None:
    empty = bench.batch([], group_id=[], reward=[], response_mask=[], old_logprob=[], ref_logprob=[])
    (output,) = advantage([Part(0, empty)], bench.context("advantage", nodes=node(kl_in_reward={"coef": 0.1})))
    assert len(output.columns["advantage"]) == 0
