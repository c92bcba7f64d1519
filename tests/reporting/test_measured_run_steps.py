"""Which steps of a run stand for the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dagrl.reporting.measured_run import usual_steps


def usual(steps: int, *, save_every: int, pause_after: int = 0) -> list[int]:
    numbers = list(range(1, steps + 1))
    run: Any = SimpleNamespace(
        pauses=lambda: [(pause_after, 9.0)] if pause_after else [],
        by_step=dict.fromkeys(numbers),
        timed_steps=numbers,
    )
    plan: Any = SimpleNamespace(validates=lambda step: False, saves=lambda step: step % save_every == 0)
    return usual_steps(run, plan)


@pytest.mark.parametrize(
    ("steps", "save_every", "found"),
    [
        (6, 10, [2, 3, 4, 5, 6]),
        (6, 2, [3, 5]),
        # A single other step would tell too little.
        (4, 2, [2, 3, 4]),
        (3, 1, [2, 3]),
        (1, 1, []),
    ],
)
def test_steps_that_save_are_left_out_where_enough_others_are_there(steps: int, save_every: int, found: list) -> None:
    assert usual(steps, save_every=save_every) == found


def test_the_first_step_after_a_pause_is_a_start() -> None:
    assert usual(6, save_every=10, pause_after=3) == [2, 3, 5, 6]
