"""Which steps stay recorded."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.data.stats import Stat
from dagrl.orchestrator.records.ring import AlarmDetector, Ring


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
    ("events", "metrics", "told"),
    [
        (("nonfinite", "spike"), {"kl": Stat.of([math.inf])}, "kl of update is inf"),
        (("nonfinite", "spike"), {"kl": Stat.of([math.nan, 1.0])}, "kl of update is nan"),
        (("spike",), {"kl": Stat.of([math.inf])}, None),
        (("nonfinite", "spike"), {"kl": Stat.of([])}, None),
        (("nonfinite", "spike"), {"grad_norm": Stat.of([5.1])}, "grad_norm of update is 5.1, and its median was 1"),
        (("nonfinite", "spike"), {"grad_norm": Stat.of([4.9])}, None),
        (("nonfinite", "spike"), {"critic/grad_norm": Stat.of([1.0, 9.0])}, "grad_norm of update is 9, and its"),
        (("nonfinite",), {"grad_norm": Stat.of([99.0])}, None),
    ],
)
def test_alarms(events: tuple[str, ...], metrics: dict[str, Stat], told: str | None) -> None:
    detector = AlarmDetector(events)
    for _ in range(5):
        assert detector.look("update", {"grad_norm": Stat.of([1.0])}) is None
    found = detector.look("update", metrics)
    assert found is None if told is None else found is not None and found.startswith(told)


def test_the_first_norms_are_no_spikes_and_nodes_have_their_own() -> None:
    detector = AlarmDetector(("spike",))
    assert [detector.look("update", {"grad_norm": Stat.of([norm])}) for norm in (1, 100, 1, 1, 1)] == [None] * 5
    assert detector.look("critic", {"grad_norm": Stat.of([100.0])}) is None
    assert detector.look("update", {"grad_norm": Stat.of([100.0])}) is not None
