"""What the benchmarks make of a run's files: worked out by hand on small ones."""

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def dagrl_run(benchmark_module):
    return benchmark_module("dagrl_run")


@pytest.fixture
def event(dagrl_run):
    def make(name: str, start: float, end: float, step: int = 2, worker: str = "actor/0"):
        return dagrl_run.Event(name, name, start, end, step, worker)

    return make


def test_a_timeline_is_read_in_order_and_names_the_sleeping_engine(dagrl_run, tmp_path: Path) -> None:
    run = object.__new__(dagrl_run.DagrlRun)
    run.folder = tmp_path
    told = [
        {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "gpu"}},
        *(
            {"name": name, "cat": name, "ph": "X", "ts": ts, "dur": 500_000, "args": {"step": 1, "worker": "actor/0"}}
            for name, ts in [("sleep", 3_000_000), ("update", 2_000_000)]
        ),
    ]
    (tmp_path / "timeline.json").write_text(json.dumps(told))
    events = run.events()
    assert [each.label for each in events] == ["update", "sleep actor"]
    assert (events[0].start, events[0].end, events[0].seconds) == (2.0, 2.5, 0.5)


def test_only_whole_lines_of_metrics_count(dagrl_run, tmp_path: Path) -> None:
    run = object.__new__(dagrl_run.DagrlRun)
    run.folder = tmp_path
    assert run.metrics() == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2')
    assert run.metrics() == [{"step": 1}]


def test_idle_is_what_no_event_covers(benchmark_module, event) -> None:
    step = benchmark_module("step")
    events = [event("rollout", 0, 4), event("reward", 3, 5), event("update", 6, 9), event("reward", 3.5, 5.5)]
    # Rollout and reward cover 0 to 5.5, update 3 more; the step took 10.
    assert step._by_name([events], [10.0]) == {"rollout": 4, "reward": 2.5, "update": 3, "idle": pytest.approx(1.5)}


def test_ready_is_when_weights_and_generator_are_back(benchmark_module, event) -> None:
    weight_sync = benchmark_module("weight_sync")
    events = [
        event("update", 1.0, 2.0, step=1),
        event("sleep", 2.0, 2.1),
        event("sync", 2.1, 2.4),
        event("wake", 2.4, 2.5, worker="generator/0"),
        event("rollout", 2.7, 3.0),
        event("sync", 9.0, 9.9, step=3),
    ]
    seconds, between = weight_sync._update_to_ready(events, 2)
    assert seconds == pytest.approx(0.5)
    assert between == pytest.approx({"sleep actor": 0.1, "sync": 0.3, "wake generator": 0.1})


def test_a_rollout_is_timed_from_its_prompts_on(benchmark_module, event) -> None:
    rollout = benchmark_module("rollout")

    class Told:
        def events(self):
            return [event("prompts", 0, 1), event("rollout", 1.2, 4), event("rollout", 1.2, 5), event("reward", 4, 6)]

    assert rollout._node_seconds(Told(), 2) == 4.0


def test_a_verdict_holds_a_figure_against_its_aim(benchmark_module) -> None:
    reports = benchmark_module("reports")
    assert reports.Verdict("speed", 0.98, "at least", 0.97).met
    assert not reports.Verdict("speed", 0.96, "at least", 0.97).met
    assert not reports.Verdict("seconds", 0.061, "at most", 0.06).met
    assert reports.Verdict("ratio", 1.0, "exactly", 1.0).met
    for sense in ("at least", "at most", "exactly"):
        assert not reports.Verdict("unknown", float("nan"), sense, 1.0).met


def test_a_trend_is_the_slope_over_cycles(benchmark_module) -> None:
    sleep_cycles = benchmark_module("sleep_cycles")
    assert sleep_cycles.trend({10: 5.0, 12: 6.0, 16: 8.0}) == pytest.approx(0.5)
    assert sleep_cycles.trend({10: 5.0}) == 0.0


def test_learning_is_a_reward_that_stays_high(benchmark_module) -> None:
    learning = benchmark_module("learning")

    def metrics(*rewards: float) -> list[dict[str, float]]:
        told = {"ratio/mean": 1.0, "mismatch/logprob_diff": 0.001}
        return [told | {"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]

    assert not learning.has_learned(metrics(0.95, 0.95, 0.95, 0.95))
    assert not learning.has_learned(metrics(0.99, 0.99, 0.95, 0.8, 0.7))
    learned = metrics(0.01, 0.5, 0.91, 0.92, 0.93, 0.94, 0.95)
    assert learning.has_learned(learned)
    assert all(verdict.met for verdict in learning.verdicts("one_gpu_colocated", learned))
    learned[0] |= {"ratio/mean": 1.0000001, "mismatch/logprob_diff": 0.03}
    assert [verdict.met for verdict in learning.verdicts("one_gpu_colocated", learned)] == [True, True, False, False]


def test_first_steps_are_compared_metric_by_metric(benchmark_module) -> None:
    learning = benchmark_module("learning")
    one = {"reward/mean": 0.5, "entropy": 2.0, "grad_norm": 1.0, "time/step_s": 1.0}
    other = {"reward/mean": 0.5, "entropy": 1.9, "grad_norm": 1.01, "time/step_s": 9.0}
    assert learning.largest_difference(one, other) == ("entropy", pytest.approx(0.05))


def test_every_layout_that_learns_is_a_pipeline_that_can_be_loaded(benchmark_module, tmp_path: Path) -> None:
    import yaml

    from dagrl.config.loading.loader import load_pipeline

    learning = benchmark_module("learning")
    for name, case in learning.CASES.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(learning.pipeline(name, 5)))
        pipeline = load_pipeline(path).pipeline
        assert sum(group.ranks for group in pipeline.groups.values()) == case.gpus
        assert pipeline.engines["generator"].backend == case.backend
