"""A step's statistics and spans become metrics and a timeline."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dagrl.config.coordinates import Coordinates
from dagrl.config.schema import Scope
from dagrl.config.schema.alarms import STOPS, parse_condition
from dagrl.data.stats import Stat
from dagrl.orchestrator.steps.record import StepRecord
from dagrl.scheduler.commands import Run
from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import HOST, Executor, PlannedTask, Rows, WorkerId
from dagrl.workers.messages import Block, Usage

RANKS = (Coordinates(0, 0, 0, 0, primary=True), Coordinates(0, 0, 1, 0, primary=True))
GENERATOR = Executor("generator", "rollout", RANKS, ("generator",))
ON_HOST = Executor(HOST, None, RANKS)
ROLLOUT = PlannedTask("rollout", "rollout", "rollout", "generator", Scope.ROW, Rows.TRAIN)
UPDATE = PlannedTask("train_it", "train_it", "update", "generator", Scope.BATCH, Rows.TRAIN)


def block(
    start: float, end: float, *shards: int, stats: Mapping[str, Stat] | None = None, usage: Usage | None = None
) -> Block:
    nothing = np.zeros(0, dtype=np.int64)
    return Block(nothing, None, None, start, end, shards, dict(stats or {}), usage=usage)


def metrics_of(*stats: Mapping[str, Stat]) -> dict[str, float]:
    record = StepRecord(3)
    for each in stats:
        record.add_block(Run(3, "any", (0,)), block(0, 1, 0, stats=each), WorkerId("w", 0))
    return record.metrics(tokens=100, policy_version=2, slots=4)


def test_spans_of_the_ranks_become_one_activity_for_each_shard() -> None:
    record, run = StepRecord(3), Run(3, "rollout", (0, 1))
    record.add_block(run, block(10, 12, 1), WorkerId("generator", 0))
    record.add_block(run, block(12, 15, 0), WorkerId("generator", 0))
    record.add_block(run, block(11, 13, 1), WorkerId("generator", 1))
    record.add_block(run, block(13, 14, 0), WorkerId("generator", 1))
    record.finish_run(run, ROLLOUT, GENERATOR)
    assert sorted(record.activities, key=lambda each: each.start) == [
        Activity("rollout", "rollout", 10, 13, 3, 1, "rollout", WorkerId("generator", 0)),
        Activity("rollout", "rollout", 12, 15, 3, 0, "rollout", WorkerId("generator", 0)),
    ]


def test_a_stream_has_an_activity_for_each_shard_with_rows() -> None:
    record, run = StepRecord(3), Run(3, "rollout", (0, 1, 2))
    record.add_block(run, block(10, 12, 0, 1), WorkerId("generator", 0))
    record.add_block(run, block(10, 15, 1, 2), WorkerId("generator", 1))
    record.add_block(run, block(10, 16), WorkerId("generator", 0))
    record.finish_run(run, replace(ROLLOUT, streams=True), GENERATOR)
    seen = {each.shard: (each.start, each.end) for each in record.activities}
    assert seen == {0: (10, 12), 1: (10, 15), 2: (10, 15)}
    # The last piece, of rows that the batch does without, took its time too.
    assert record.metrics(tokens=1, policy_version=2, slots=1)["time/rollout_s"] == 6


def test_an_activity_of_the_whole_batch_has_no_shard() -> None:
    record, run = StepRecord(3), Run(3, "train_it", (0, 1))
    record.add_block(run, block(2, 5), WorkerId("generator", 0))
    record.add_block(run, block(1, 4), WorkerId("generator", 1))
    record.finish_run(run, UPDATE, GENERATOR)
    assert record.activities == [Activity("train_it", "update", 1, 5, 3, None, "rollout", WorkerId("generator", 0))]


def test_work_without_an_engine_belongs_to_the_host() -> None:
    record, run = StepRecord(3), Run(3, "rollout", (0,))
    record.add_block(run, block(2, 5, 0), WorkerId("host", 1))
    record.finish_run(run, ROLLOUT, ON_HOST)
    assert (record.activities[0].group, record.activities[0].worker) == (HOST, WorkerId("host", 1))


def test_runs_of_a_task_that_overlap_are_kept_apart() -> None:
    record, first, second = StepRecord(3), Run(3, "rollout", (0,)), Run(3, "rollout", (1,))
    record.add_block(first, block(1, 2, 0), WorkerId("host", 0))
    record.add_block(second, block(1, 9, 1), WorkerId("host", 1))
    record.finish_run(first, ROLLOUT, ON_HOST)
    assert [activity.shard for activity in record.activities] == [0]
    record.finish_run(second, ROLLOUT, ON_HOST)
    assert [activity.shard for activity in record.activities] == [0, 1]


def test_a_run_without_work_leaves_no_trace() -> None:
    record = StepRecord(3)
    record.finish_run(Run(3, "rollout", (0,)), ROLLOUT, GENERATOR)
    assert record.activities == []


def test_a_nodes_time_is_that_in_which_any_of_its_shards_runs(monkeypatch) -> None:
    record, run = StepRecord(3), Run(3, "rollout", (0, 1))
    record.add_block(run, block(1, 2, 0), WorkerId("host", 0))
    record.add_block(run, block(3, 5, 1), WorkerId("host", 0))
    record.add_block(run, block(4, 5.5, 1), WorkerId("host", 1))
    record.finish_run(run, ROLLOUT, ON_HOST)
    with monkeypatch.context() as patched:
        patched.setattr("dagrl.orchestrator.steps.record.time", SimpleNamespace(time=lambda: 4))
        record.add_move("sync", GENERATOR, 0)
    assert record.activities[-1] == Activity("sync", "sync", 0, 4, 3, None, "rollout", WorkerId("generator", 0))
    found = record.metrics(tokens=100, policy_version=2, slots=4)
    assert found["time/rollout_s"] == 3.5
    assert found["time/sync_s"] == 4


def test_statistics_of_the_contract_come_with_their_details() -> None:
    found = metrics_of(
        {
            "reward": Stat.of([1, 0, 0, 1]),
            "prompt_tokens": Stat.of([3, 4]),
            "response_tokens": Stat.of([2, 6]),
            "staleness": Stat.of([0, 1]),
            "loss/policy": Stat.of([0.5]),
            "reward/failed_fraction": Stat.of([1, 0, 0, 0]),
        }
    )
    assert {name: value for name, value in found.items() if not name.startswith(("time/", "throughput/"))} == {
        "policy_version": 2,
        "driver/bytes": 0,
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "prompt_tokens/mean": 3.5,
        "prompt_tokens/max": 4,
        "response_tokens/mean": 4,
        "response_tokens/max": 6,
        "staleness/mean": 0.5,
        "staleness/max": 1,
        "loss/policy": 0.5,
        "reward/failed_fraction": 0.25,
    }


@pytest.mark.parametrize("condition", STOPS)
def test_what_stops_a_run_is_a_metric_by_its_own_name(condition: str) -> None:
    metric = parse_condition(condition).metric
    assert metrics_of({metric: Stat.of([1, 0])})[metric] == 0.5


def test_validation_has_the_same_names_below_val() -> None:
    found = metrics_of({"reward": Stat.of([1.0]), "val/reward": Stat.of([0, 0.5]), "val/response_tokens": Stat.of([3])})
    assert (found["reward/mean"], found["val/reward/mean"], found["val/reward/std"]) == (1, 0.25, 0.25)
    assert (found["val/response_tokens/mean"], found["val/response_tokens/max"]) == (3, 3)
    assert "val/reward" not in found


def test_statistics_of_shards_and_ranks_count_by_their_rows() -> None:
    found = metrics_of({"reward": Stat.of([1.0])}, {"reward": Stat.of([0, 0, 0])}, {"grad_norm": Stat.of([2.0])}, {})
    assert found["reward/mean"] == 0.25
    assert found["reward/std"] == pytest.approx((1 / 4 - 1 / 16) ** 0.5)
    assert found["grad_norm"] == 2


def test_a_number_is_kept_unchanged() -> None:
    record = StepRecord(3)
    record.add_number("run/restarts", 4)
    assert record.metrics(tokens=1, policy_version=2, slots=1)["run/restarts"] == 4


def test_prompts_of_several_rounds_are_added_up() -> None:
    record = StepRecord(2)
    for number in (4, 3):
        record.add_number("rollout/carried_prompts", number)
    assert record.metrics(tokens=1, policy_version=2, slots=1)["rollout/carried_prompts"] == 7


def test_throughput_is_the_steps_tokens_over_its_time() -> None:
    found = metrics_of({})
    assert found["time/step_s"] > 0
    assert found["throughput/tokens_per_s"] * found["time/step_s"] == pytest.approx(100)
    assert found["throughput/tokens_per_s_per_gpu"] == found["throughput/tokens_per_s"] / 4


def test_engine_metrics_of_a_tasks_runs_are_combined() -> None:
    record = StepRecord(3)
    for shard, start in ((0, 0.0), (1, 5.0)):
        run = Run(3, "rollout", (shard,))
        for rank, seconds in ((0, 2.0), (1, 1.0)):
            record.add_block(run, block(start, start + seconds, shard, usage=Usage(30, 100, 50.0, 2**31)), f"g/{rank}")
        record.finish_run(run, ROLLOUT, GENERATOR)
    found = record.metrics(tokens=1, policy_version=2, slots=1)
    # Both ranks are held for two seconds in each of the two runs.
    assert found["throughput/rollout_tokens_per_s_per_gpu"] == 120 / 4 / 2
    assert found["mfu/rollout"] == 400 / (4 * 2 * 50)
    assert found["memory/rollout_peak_gib"] == 2


def test_cpu_workers_report_no_usage() -> None:
    record, run = StepRecord(3), Run(3, "rollout", (0,))
    record.add_block(run, block(1, 2, 0), WorkerId("host", 0))
    record.finish_run(run, ROLLOUT, ON_HOST)
    names = record.metrics(tokens=1, policy_version=2, slots=1)
    assert not [name for name in names if name.startswith(("mfu/", "memory/", "throughput/rollout"))]


def test_messages_through_the_driver_are_counted() -> None:
    record = StepRecord(3, driver_bytes=1234)
    assert record.metrics(tokens=1, policy_version=3, slots=1)["driver/bytes"] == 1234


def test_the_most_memory_that_an_executor_has_freed_counts() -> None:
    record = StepRecord(3)
    for gib in (30.0, 42.5, 41.0):
        record.add_freed("generator", gib)
    assert record.metrics(tokens=1, policy_version=2, slots=1)["memory/generator_freed_gib"] == 42.5


def test_samples_that_were_too_old_are_counted_and_ages_have_a_mean_and_a_most() -> None:
    ranks = ([0.0, 1.0], [1.0, 1.0, 0.0])
    found = metrics_of(*({"staleness/masked": Stat.of(each), "staleness": Stat.of(each)} for each in ranks))
    assert found["staleness/masked"] == 3
    assert (found["staleness/mean"], found["staleness/max"]) == (0.6, 1)


def test_a_step_that_began_before_the_last_commit_counts_from_then_on() -> None:
    record = StepRecord(3, _began=1000.0)

    def seconds(**commit: float) -> float:
        return record.metrics(tokens=100, policy_version=3, slots=1, **commit)["time/step_s"]

    now = time.time()
    assert seconds() >= now - 1000
    assert seconds(last_commit=500.0) >= now - 1000
    assert seconds(last_commit=now) < now - 1000
