"""Steps of engines that only wait: their critical path, and what is beyond it, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest


@pytest.fixture(scope="module")
def timed_steps(benchmark_module):
    return benchmark_module("timed_steps")


@pytest.fixture
def shape(timed_steps):
    return timed_steps.Shape(generators=2, trainers=2, shards=2, prompts=8, n=4, response_tokens=16)


def timings_of(shape, **changed):
    found = shape.timings(rollout_s=0.8, update_s=0.5, sync_s=0.2, portion=1)
    return replace(found, **changed)


def test_the_last_shards_log_probs_are_behind_the_rollout(timed_steps, shape) -> None:
    # Prompts come at 0.2, 0.4, 0.6 and 0.8 on both servers: shards of four at 0.4 and 0.8; log-probs take 0.2.
    assert timed_steps.critical_s(shape, timings_of(shape)) == pytest.approx(0.2 + 0.8 + 0.2 + 0.5)


def test_log_probs_that_are_slower_than_shards_come_one_after_the_other(timed_steps, shape) -> None:
    assert timed_steps.critical_s(shape, timings_of(shape, logprob_s=0.6)) == pytest.approx(0.2 + 0.4 + 2 * 0.6 + 0.5)


def test_portions_of_several_prompts_fill_a_shard_later(timed_steps, shape) -> None:
    # The first server has prompts 0 to 3, which are the first shard: both shards are there at the end.
    timings = timings_of(shape, portion=4 * shape.n)
    assert timed_steps.critical_s(shape, timings) == pytest.approx(0.2 + 0.8 + 2 * 0.2 + 0.5)


def test_servers_that_get_different_numbers_of_prompts_are_refused(timed_steps, shape) -> None:
    with pytest.raises(ValueError, match="7 prompts are not the same number for each of 2 servers"):
        replace(shape, prompts=7)


def test_time_beyond_the_critical_path_is_reported_by_interval(timed_steps, shape, benchmark_module) -> None:
    event = benchmark_module("dagrl_run").Event
    timings = timings_of(shape)
    events = []
    for step in (1, 2, 3):
        # Late by 0.01 before the sync, 0.02 in it, 0.03 before the rollout, ... 0.08 in the update.
        at = 3.0 * step
        for name, wait, seconds in (
            ("sync", 0.01, 0.22),
            ("rollout", 0.03, 0.84),
            ("ref", 0.0, 0.25),
            ("advantage", 0.0, 0.06),
            ("update", 0.07, 0.58),
        ):
            events.append(event(name, name, at + wait, at + wait + seconds, step, "actor/0"))
            at += wait + seconds
    found = timed_steps.overheads(events, shape, timings, [2, 3])
    # A step every 3 s, 1.7 of which are the engines'. What is named takes 2.06 s; until the next sync there is a gap.
    assert found["step"] == pytest.approx(1300)
    assert {name: value for name, value in found.items() if name != "step"} == pytest.approx(
        {
            "begin to sync begins": 950,
            "sync": 20,
            "sync to rollout begins": 30,
            "rollout": 40,
            "ref": 50,
            "advantage": 60,
            "advantage to update begins": 70,
            "update": 80,
        }
    )
    assert sum(value for name, value in found.items() if name != "step") == pytest.approx(found["step"])
