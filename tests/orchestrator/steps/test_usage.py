"""Tokens a second, utilization and memory of a step's runs."""

from __future__ import annotations

import pytest

from dagrl.orchestrator.steps.record import TaskUsage
from dagrl.scheduler.intervals import Interval
from dagrl.workers.messages import Usage


def use_of(ranks: int, *parts: tuple[float, float, Usage]) -> TaskUsage:
    use = TaskUsage(ranks)
    for start, end, usage in parts:
        use.add(Interval(start, end), usage)
    return use


def test_tokens_are_shared_by_all_ranks_that_were_there() -> None:
    # Two ranks with half of the tokens each, and their two silent companions; 4 busy seconds.
    use = use_of(
        4,
        (0, 4, Usage(300, None, None, None)),
        (0, 3, Usage(100, None, None, None)),
        (0, 4, Usage(0, None, None, None)),
        (0, 4, Usage(0, None, None, None)),
    )
    assert use.metrics("update") == {"throughput/update_tokens_per_s_per_gpu": 400 / 4 / 4}


def test_utilization_is_of_all_devices_peaks() -> None:
    silent = Usage(0, 0, 1000.0, 2**30)
    use = use_of(2, (0, 2, Usage(10, 600, 1000.0, 3 * 2**30)), (0, 2, silent), (5, 7, silent))
    # 600 operations in 4 busy seconds on two devices of 1000 a second.
    assert use.metrics("ref") == {
        "throughput/ref_tokens_per_s_per_gpu": 10 / 4 / 2,
        "mfu/ref": 600 / (4 * 2 * 1000),
        "memory/ref_peak_gib": 3,
    }


@pytest.mark.parametrize("unknown", [Usage(0, None, 1000.0, None), Usage(0, 0, None, None)])
def test_values_that_one_rank_does_not_know_are_not_guessed(unknown: Usage) -> None:
    use = use_of(2, (0, 2, Usage(10, 600, 1000.0, None)), (0, 2, unknown))
    assert "mfu/ref" not in use.metrics("ref")
    assert "throughput/ref_tokens_per_s_per_gpu" in use.metrics("ref")


def test_a_run_without_any_time_has_no_speed() -> None:
    assert use_of(1, (2, 2, Usage(10, 1, 1.0, 1))).metrics("ref") == {}
