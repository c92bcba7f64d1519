"""Tokens a second, utilization and memory of a step's runs."""

from __future__ import annotations

import pytest

from dagrl.orchestrator.steps.record import usage_metrics
from dagrl.scheduler.intervals import Interval
from dagrl.workers.messages import Usage


def metrics_of(task: str, ranks: int, *blocks: tuple[float, float, Usage]) -> dict[str, float]:
    return usage_metrics(task, ranks, [(Interval(start, end), usage) for start, end, usage in blocks])


def test_tokens_are_shared_by_all_ranks_that_were_there() -> None:
    # Two ranks with half of the tokens each, and their two silent companions; 4 busy seconds.
    metrics = metrics_of(
        "update",
        4,
        (0, 4, Usage(300, None, None, None)),
        (0, 3, Usage(100, None, None, None)),
        (0, 4, Usage(0, None, None, None)),
        (0, 4, Usage(0, None, None, None)),
    )
    assert metrics == {"throughput/update_tokens_per_s_per_gpu": 400 / 4 / 4}


def test_utilization_is_of_all_devices_peaks() -> None:
    silent = Usage(0, 0, 1000.0, 2**30)
    metrics = metrics_of("ref", 2, (0, 2, Usage(10, 600, 1000.0, 3 * 2**30)), (0, 2, silent), (5, 7, silent))
    # 600 operations in 4 busy seconds on two devices of 1000 a second.
    assert metrics == {
        "throughput/ref_tokens_per_s_per_gpu": 10 / 4 / 2,
        "mfu/ref": 600 / (4 * 2 * 1000),
        "memory/ref_peak_gib": 3,
    }


@pytest.mark.parametrize("unknown", [Usage(0, None, 1000.0, None), Usage(0, 0, None, None)])
def test_values_that_one_rank_does_not_know_are_not_guessed(unknown: Usage) -> None:
    metrics = metrics_of("ref", 2, (0, 2, Usage(10, 600, 1000.0, None)), (0, 2, unknown))
    assert "mfu/ref" not in metrics
    assert "throughput/ref_tokens_per_s_per_gpu" in metrics


def test_a_run_without_any_time_has_no_speed() -> None:
    assert metrics_of("ref", 1, (2, 2, Usage(10, 1, 1.0, 1))) == {}
