"""How much of the time stretches of it cover."""

from __future__ import annotations

import pytest

from dagrl.scheduler.intervals import Interval, busy_seconds


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0),
        ([(1, 3)], 2),
        ([(1, 3), (3, 4)], 3),
        ([(5, 6), (1, 3)], 3),
        ([(1, 4), (2, 3)], 3),
        ([(1, 3), (2, 5), (7, 8)], 5),
    ],
)
def test_time_in_which_something_runs_counts_once(spans, seconds) -> None:
    assert busy_seconds([Interval(*span) for span in spans]) == seconds
