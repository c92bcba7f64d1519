"""Idle time is named after what a group waits for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.reporting.run_data.views import DRIVER, idle_times
from dagrl.scheduler.intervals import Activity, Interval, busy_seconds
from dagrl.scheduler.plan import WorkerId


def span(name: str, group: str, start: float, end: float) -> Activity:
    return Activity(name, name, start, end, 1, None, group, WorkerId(f"{group}er", 0))


WINDOW = Interval(0.0, 10.0)
UPDATE = span("update", "train", 6, 10)
ROLLOUT = span("rollout", "generate", 1, 4)


@pytest.mark.parametrize(
    ("spans", "told"),
    [
        # Before the rollout begins, and between it and the update, nothing runs.
        ([ROLLOUT, UPDATE], [(0, 1, DRIVER), (1, 4, "rollout (generateer)"), (4, 6, DRIVER)]),
        # The reward ends last before the update begins: it is waited for while it runs, the rollout before that.
        (
            [ROLLOUT, span("reward", "host", 3, 6), UPDATE],
            [(0, 1, DRIVER), (1, 3, "rollout (generateer)"), (3, 6, "reward (hoster)")],
        ),
        # What goes on after the group has begun again is not what it waited for.
        (
            [span("save", "other", 0, 9), span("rollout", "generate", 0, 6), UPDATE],
            [(0, 6, "rollout (generateer)")],
        ),
        # Until the end of the window, it waits for what runs on.
        ([span("update", "train", 0, 4), span("rollout", "generate", 4, 12)], [(4, 10, "rollout (generateer)")]),
        ([span("update", "train", -1, 11)], []),
        ([], [(0, 10, DRIVER)]),
    ],
)
def test_pauses_have_the_name_of_their_cause(spans: list[Activity], told: list[tuple]) -> None:
    found = idle_times("train", spans, WINDOW)
    assert [(idle.start, idle.end, idle.cause) for idle in found] == told


TIMES = st.integers(0, 40).map(lambda quarter: quarter / 4)


@given(st.lists(st.tuples(st.sampled_from(["train", "generate", "host"]), TIMES, TIMES)))
def test_a_group_is_busy_or_idle_at_each_moment(drawn: list[tuple[str, float, float]]) -> None:
    spans = [span("node", group, min(times), max(times)) for group, *times in drawn]
    idle = idle_times("train", spans, WINDOW)
    busy = [Interval(each.start, each.end) for each in spans if each.group == "train"]
    assert sum(each.seconds for each in idle) + busy_seconds(busy) == pytest.approx(10.0)
    assert all(one.end <= other.start for one, other in pairwise(idle))
