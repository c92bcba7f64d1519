"""The critical path: which activities a step had to wait for, and why."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_parts import ONE_RANK, executor, for_validation, task

from dagrl.config.schema import Scope
from dagrl.reporting.why.critical_path import Part, critical_path
from dagrl.scheduler.intervals import Activity, Interval
from dagrl.scheduler.plan import HOST, Executor, Plan, WorkerId

EXECUTORS = [
    Executor(HOST, None, ONE_RANK),
    executor("actor", "train", trained=True),
    executor("generator", "generate", weights_from="actor"),
]
TASKS = (
    task("rollout", "generator", streams=True, generates=True),
    task("reward", HOST, "rollout"),
    task("ref", "actor", "rollout"),
    task("samples", HOST, "reward"),
    task("update", "actor", "reward", "ref", scope=Scope.BATCH, trains=True),
)
PLAN = Plan({each.name: each for each in EXECUTORS}, TASKS, shards=2, steps=9)
GROUPS = {"generator": "generate", "actor": "train", "host": "host"}


def span(name: str, on: str, start: float, end: float, shard: int | None = None) -> Activity:
    return Activity(name, name, start, end, 1, shard, GROUPS[on], WorkerId(on, 0))


def told(parts: list[Part]) -> list[tuple]:
    return [(part.name, part.cause, part.start, part.end) for part in parts]


def test_hidden_activities_are_not_on_the_path() -> None:
    spans = [
        span("sync", "generator", 0, 1),
        span("rollout", "generator", 1, 4, 0),
        # Nothing waits for the samples, though they end just before the update begins.
        span("reward", "host", 4, 5),
        span("samples", "host", 5, 6.9),
        span("ref", "actor", 4, 6),
        span("update", "actor", 7, 10),
    ]
    assert told(critical_path(spans, Interval(0, 10.5), PLAN)) == [
        ("sync", "weights travel", 0, 1),
        ("rollout", "generation", 1, 4),
        ("ref", "computation", 4, 6),
        ("driver", "no worker runs", 6, 7),
        ("update", "computation", 7, 10),
        ("driver", "no worker runs", 10, 10.5),
    ]


@pytest.mark.parametrize("late", [0.001, 0.04])
def test_a_task_of_the_host_waits_for_its_processes_however_late_it_is_given_to_one(late: float) -> None:
    spans = [
        span("rollout", "generator", 0, 1, 0),
        span("rollout", "generator", 0, 1.5, 1),
        span("reward", "host", 1, 6, 0),
        span("reward", "host", 6 + late, 11, 1),
        span("update", "actor", 11, 12),
    ]
    parts = critical_path(spans, Interval(0, 12), PLAN)
    assert sum(part.end - part.start for part in parts if part.name == "reward") == pytest.approx(10 - late)
    assert sum(part.end - part.start for part in parts if part.name == "driver") <= late + 1e-9


@pytest.mark.parametrize(("last", "straggles"), [(4, False), (9, True)])
def test_the_time_of_the_last_shard_alone_is_a_straggler(last: float, straggles: bool) -> None:
    spans = [
        *(span("rollout", "generator", 0, end, end - 1) for end in (1, 2, 3)),
        span("rollout", "generator", 0, last, 3),
    ]
    spans.append(span("update", "actor", last, 10))
    expected = [("rollout", "generation", 0, 3), ("rollout", "waits for the last responses", 3, last)]
    if not straggles:
        expected = [("rollout", "generation", 0, last)]
    plan = replace(PLAN, shards=4, tasks=(*TASKS[:-1], task("update", "actor", "rollout", trains=True)))
    assert told(critical_path(spans, Interval(0, 10), plan)) == [*expected, ("update", "computation", last, 10)]


def test_shards_of_a_rollout_that_begin_one_after_the_other_leave_no_pause() -> None:
    # The servers take the last shard's requests when the first ones are done; each shard has a long response.
    starts = [(0, 22), (2, 24), (9, 23), (15, 25)]
    spans = [
        span("sync", "generator", -1, 0),
        *(span("rollout", "generator", start, end, shard) for shard, (start, end) in enumerate(starts)),
        span("update", "actor", 25, 26),
    ]
    parts = critical_path(spans, Interval(-1, 26), replace(PLAN, shards=4))
    assert {part.name for part in parts} == {"sync", "rollout", "update"}
    assert sum(part.end - part.start for part in parts if part.name == "rollout") == 25


def test_a_validation_is_named_as_one() -> None:
    tasks = (*TASKS, *for_validation(list(TASKS), "rollout", "reward"))
    spans = [
        span("update", "actor", 0, 1),
        span("sync", "generator", 1, 2),
        span("val/rollout", "generator", 2, 20, 0),
        span("val/rollout", "generator", 9, 24, 1),
        span("val/reward", "host", 24, 25, 1),
    ]
    assert told(critical_path(spans, Interval(0, 25), replace(PLAN, tasks=tasks))) == [
        ("update", "computation", 0, 1),
        ("sync", "weights travel", 1, 2),
        ("val/rollout", "validation", 2, 24),
        ("val/reward", "validation", 24, 25),
    ]


def test_weights_that_come_after_the_call_of_a_rollout_are_waited_for() -> None:
    spans = [span("update", "actor", 0, 2), span("sync", "generator", 2, 3), span("rollout", "generator", 2.5, 6)]
    assert told(critical_path(spans, Interval(0, 6), PLAN)) == [
        ("update", "computation", 0, 2),
        ("sync", "weights travel", 2, 3),
        ("rollout", "generation", 3, 6),
    ]


TIMES = st.integers(-8, 48).map(lambda quarter: quarter / 4)
NODES = st.sampled_from([("rollout", "generator"), ("ref", "actor"), ("sync", "generator"), ("reward", "host")])
SPANS = st.tuples(NODES, TIMES, TIMES)


@given(st.lists(SPANS, max_size=12))
def test_the_parts_cover_the_window_in_order(drawn: list) -> None:
    spans = [span(name, on, min(times), max(times)) for (name, on), *times in drawn]
    window = Interval(0, 10)
    within = [each for each in spans if each.end > window.start and each.start < window.end]
    parts = critical_path(within, window, PLAN)
    assert parts[0].start == 0 and parts[-1].end == 10
    assert all(one.end == pytest.approx(other.start) for one, other in pairwise(parts))
