"""Which steps stay recorded."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.data.stats import Stat
from dagrl.orchestrator.records.ring import Ring, nonfinite


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 5))
def test_the_last_steps_can_be_replayed_at_any_time(keep_last: int, steps: int, resumed: int) -> None:
    ring, recorded, states = Ring(keep_last), set(), set()
    for step in range(resumed + 1, resumed + steps + 1):
        # A step has many runs.
        if any([ring.begin(step), ring.begin(step)]):
            states.add(step - 1)
        recorded.add(step)
        for dropped in ring.commit(step, remarkable=False):
            recorded -= set(dropped)
            states.discard(dropped.start - 1)
        for wanted in range(max(resumed + 1, step - keep_last + 1), step + 1):
            start = max(state for state in states if state < wanted)
            assert set(range(start + 1, wanted + 1)) <= recorded
        assert len(recorded) <= 3 * keep_last and len(states) <= 3


@given(st.integers(1, 5), st.integers(1, 30), st.integers(1, 30))
def test_a_remarkable_step_and_the_one_before_it_stay(keep_last: int, remarkable: int, later: int) -> None:
    ring, recorded, states = Ring(keep_last), set(), set()
    for step in range(1, remarkable + later + 1):
        if ring.begin(step):
            states.add(step - 1)
        recorded.add(step)
        for dropped in ring.commit(step, remarkable=step == remarkable):
            recorded -= set(dropped)
            states.discard(dropped.start - 1)
    for wanted in {remarkable, max(1, remarkable - 1)}:
        start = max(state for state in states if state < wanted)
        assert set(range(start + 1, wanted + 1)) <= recorded


@given(st.integers(1, 5), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 40))
def test_a_resumed_run_drops_its_earlier_segments(keep_last: int, lives: list[int], remarkable: int) -> None:
    firsts: set[int] = set()
    kept: list[int] = []
    step = 0
    for steps in lives:
        ring = Ring(keep_last, firsts, kept)
        for _ in range(steps):
            step += 1
            if ring.begin(step):
                firsts.add(step)
            for dropped in ring.commit(step, remarkable=step == remarkable):
                firsts.remove(dropped.start)
            kept = ring.kept
        assert len(firsts - set(kept)) <= 3
    assert set(kept) <= firsts


def test_a_step_that_begins_before_the_one_before_it_has_ended_costs_nothing() -> None:
    ring = Ring(2)
    assert [ring.begin(step) for step in (1, 2, 3, 1, 2, 3)] == [True, False, True, True, False, True]


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"kl": Stat.of([math.inf])}, "kl of update is inf"),
        ({"lr": Stat.of([1.0]), "kl": Stat.of([math.nan, 1.0])}, "kl of update is nan"),
        # Without values.
        ({"kl": Stat.of([])}, None),
        ({"kl": Stat.of([99.0])}, None),
    ],
)
def test_a_metric_that_is_not_finite_is_named(metrics: dict[str, Stat], told: str | None) -> None:
    assert nonfinite("update", metrics) == told
