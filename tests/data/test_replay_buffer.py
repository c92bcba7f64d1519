"""Which groups a buffer takes, returns and drops."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.config.schema import BufferNode
from dagrl.data.replay_buffer import Entry, admitted, chosen, kept


def node(**options) -> BufferNode:
    return BufferNode(op="buffer", **{"groups_per_step": 2, **options})


def entry(step: int = 1, group: int = 0, **fields) -> Entry:
    usual = {"file": step, "place": group, "in_file": 1, "rows": 4, "nbytes": 2**20, "version": step - 1}
    usual |= {"prompt": str(group)}
    usual |= dict.fromkeys(("mean", "spread", "right"), 0.5)
    return Entry(step, group, **{**usual, **fields})


def names(entries) -> list[tuple[int, int]]:
    return [(each.step, each.group) for each in entries]


@pytest.mark.parametrize(
    ("options", "fields", "is_admitted"),
    [
        ({}, {}, True),
        ({}, {"spread": 0.0}, False),
        ({"keep": "all"}, {"spread": 0.0}, True),
        ({"keep": "all"}, {"mean": float("nan")}, False),
        ({}, {"mean": float("inf"), "spread": float("nan")}, False),
        ({"policy": "successes"}, {"right": 0.25}, True),
        ({"policy": "successes"}, {"right": 0.5}, False),
        ({"policy": "successes", "hard_below": 1.0}, {"right": 0.75}, True),
        ({"policy": "successes", "keep": "all"}, {"right": 0.0}, False),
    ],
)
def test_groups_that_a_buffer_takes(options, fields, is_admitted) -> None:
    assert bool(admitted([entry(**fields)], node(**options))) == is_admitted


def test_fifo_returns_the_oldest_of_those_that_have_returned_least() -> None:
    groups = [entry(1, 0, uses=1), entry(2, 0), entry(1, 1), entry(2, 1), entry(1, 2, uses=1)]
    assert names(chosen(groups, node(policy="fifo", groups_per_step=3), step=3, seed=0)) == [(1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("policy", ["uniform", "best", "successes"])
def test_others_return_each_group_alike(policy) -> None:
    groups = [entry(1, group) for group in range(6)]
    counts = Counter(
        name for step in range(3000) for name in names(chosen(groups, node(policy=policy), step=step, seed=1))
    )
    # 3000 draws of 2 out of 6: a standard deviation of 26 around 1000.
    assert len(counts) == 6
    assert all(abs(count - 1000) < 130 for count in counts.values())


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [0.4, 0.1, 0.0]),
        ({"exponent": 2.0}, [0.16, 0.01, 0.0]),
        ({"exponent": 0.0}, [1.0, 1.0, 0.0]),
        ({"floor": 0.1}, [0.4, 0.1, 0.1]),
        ({"priority": "reward"}, [0.0, 1.0, 0.5]),
    ],
)
def test_prioritised_groups_return_in_proportion_to_their_priority(options, weights) -> None:
    groups = [entry(1, 0, spread=0.4, mean=-1), entry(1, 1, spread=0.1, mean=1), entry(1, 2, spread=0, mean=0.5)]
    rule = node(policy="prioritised", groups_per_step=1, **options)
    counts = Counter(name for step in range(4000) for name in names(chosen(groups, rule, step=step, seed=2)))
    for group, weight in enumerate(weights):
        assert counts[1, group] / 4000 == pytest.approx(weight / sum(weights), abs=0.04)


def test_groups_too_old_or_used_up_neither_return_nor_stay() -> None:
    rule = node(max_age=2, max_uses=3, groups_per_step=9)
    groups = [entry(1, 0, version=0), entry(1, 1, version=1), entry(2, 0, uses=3), entry(2, 1, uses=2)]
    # Step 4 trains version 3.
    assert names(chosen(groups, rule, step=4, seed=0)) == [(1, 1), (2, 1)]
    assert names(kept(groups, rule, step=3)) == [(1, 1), (2, 1)]
    assert names(kept(groups, rule, step=2)) == [(1, 0), (1, 1), (2, 1)]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"capacity": 8}, [(2, 0), (2, 1)]),
        ({"capacity": 9}, [(2, 0), (2, 1)]),
        ({"capacity_gib": 3 / 1024}, [(1, 1), (2, 0), (2, 1)]),
        ({"capacity": 8, "policy": "prioritised"}, [(1, 0), (2, 1)]),
        ({"capacity": 8, "policy": "prioritised", "priority": "reward"}, [(1, 1), (2, 0)]),
        ({"capacity": 3}, []),
        ({"policy": "best"}, [(1, 1), (2, 0)]),
        ({"policy": "best", "capacity": 4}, [(2, 0)]),
    ],
)
def test_groups_beyond_the_capacity_leave(options, left) -> None:
    groups = [
        entry(1, 0, spread=0.4, mean=0.1, prompt="a"),
        entry(1, 1, spread=0.2, mean=0.8, prompt="b"),
        entry(2, 0, spread=0.1, mean=0.8, prompt="a"),
        entry(2, 1, spread=0.3, mean=0.2, prompt="b"),
    ]
    assert names(kept(groups, node(**options), step=2)) == left


policies = st.sampled_from(["uniform", "fifo", "prioritised", "best", "successes"])


@given(policy=policies, count=st.integers(0, 6), wanted=st.integers(1, 4), seed=st.integers(0, 3), data=st.data())
def test_a_choice_depends_on_nothing_but_groups_step_and_seed(policy, count, wanted, seed, data) -> None:
    groups = [entry(1, group, spread=data.draw(st.floats(0, 1))) for group in range(count)]
    rule = node(policy=policy, groups_per_step=wanted)
    first = chosen(groups, rule, step=5, seed=seed)
    assert first == chosen(groups, rule, step=5, seed=seed)
    assert len(set(names(first))) == len(first)
    possible = [each for each in groups if policy != "prioritised" or each.spread > 0]
    assert len(first) == min(wanted, len(possible))
    assert names(first) == sorted(names(first))


def test_weights_that_underflow_are_no_error() -> None:
    groups = [entry(1, 0, spread=1e-300), entry(1, 1, spread=1.0)]
    for count, returned in ((1, [(1, 1)]), (2, [(1, 0), (1, 1)])):
        options = {"policy": "prioritised", "exponent": 3.0, "groups_per_step": count}
        with np.errstate(all="raise"):
            assert names(chosen(groups, node(**options), step=1, seed=0)) == returned


@pytest.mark.parametrize(
    ("exponent", "priorities"),
    [(400, (10.0, 5.0, 1.0)), (400, (0.5, 0.1, 0.01)), (2000, (1e-3, 1e-4, 0.0)), (1e300, (10.0, 1.0, 0.0))],
)
def test_a_large_exponent_returns_the_highest_priorities(exponent, priorities) -> None:
    groups = [entry(1, group, mean=mean) for group, mean in enumerate(priorities)]
    options = {"policy": "prioritised", "priority": "reward", "exponent": exponent, "floor": 0.0}
    for count in (1, 2):
        found = names(chosen(groups, node(groups_per_step=count, **options), step=3, seed=1))
        assert found == [(1, group) for group in range(count)]
