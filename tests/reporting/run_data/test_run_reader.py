"""A run is read while it is written: each line once, and anew after it went back to a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from finished_runs import write_run

from dagrl.cli import main
from dagrl.reporting.run_data.overview import overview
from dagrl.reporting.run_data.run_reader import RunReader, Tail, open_run
from dagrl.reporting.run_data.views import metrics_table, step_view
from dagrl.reporting.summary import summary, summary_values
from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import WorkerId
from dagrl.tracking.metrics_file import MetricsFile
from dagrl.tracking.timeline import Timeline


def complete(timeline: Timeline, name: str, start: float, end: float, step: int, group: str = "train") -> None:
    timeline.extend([Activity(name, name, start, end, step, None, group, WorkerId(name, 0))])


def test_lines_are_read_once_and_torn_ones_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tail = Tail(path.parent, path.name)
    assert tail.new_lines() == []
    path.write_text("one\ntwo\nth")
    assert tail.new_lines() == ["one", "two"]
    with path.open("a") as file:
        file.write("ree\n")
    assert tail.new_lines() == ["three"] and tail.new_lines() == []
    assert tail.generation == 0
    path.write_text("1\n")
    assert tail.new_lines() == ["1"] and tail.generation == 1
    (tmp_path / "other").write_text("a much longer file than before\n")
    (tmp_path / "other").replace(path)
    assert tail.new_lines() == ["a much longer file than before"] and tail.generation == 2


def test_a_timeline_that_grows_has_each_event_once(tmp_path: Path) -> None:
    run, timeline = RunReader(tmp_path), Timeline()
    timeline.start(tmp_path, None)
    run.refresh()
    for step in range(1, 4):
        complete(timeline, "update", step, step + 0.5, step)
        complete(timeline, "rollout", step + 0.2, step + 0.9, step, "generate")
        run.refresh()
        assert [span.step for span in run.spans] == [each for each in range(1, step + 1) for _ in "ab"]
    assert run.groups == ["generate", "train"]
    # A run that goes on from step 1 has dropped what came after it.
    timeline.close()
    timeline = Timeline()
    timeline.start(tmp_path, 1)
    run.refresh()
    assert [span.step for span in run.spans] == [1, 1] and run.timed_steps == [1]


def test_metrics_are_those_of_the_current_run(tmp_path: Path) -> None:
    run, metrics = RunReader(tmp_path), MetricsFile()
    metrics.start(tmp_path, {}, None)
    metrics.log(1, {"reward/mean": 0.25, "lr": 1 / 3})
    run.refresh()
    first = metrics_table(run)
    assert (first["steps"], first["columns"]) == ([1], {"reward/mean": [0.25], "lr": [0.333333]})
    metrics.log(2, {"reward/mean": float("nan"), "lr": 0.5})
    metrics.log(3, {"reward/mean": 0.75, "val/reward/mean": 1.0, "lr": 0.5})
    run.refresh()
    new = metrics_table(run, 1)
    assert new["generation"] == first["generation"] and new["steps"] == [2, 3]
    assert new["columns"]["reward/mean"] == [None, 0.75]
    assert metrics_table(run)["columns"]["val/reward/mean"] == {"at": [2], "values": [1.0]}
    metrics.close(ok=True)
    MetricsFile().start(tmp_path, {}, 1)
    run.refresh()
    assert metrics_table(run)["steps"] == [1] and run.generation > first["generation"]


def test_a_step_begins_with_its_engines_or_with_the_commit_before(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.start(tmp_path, None)
    complete(timeline, "prompts", 0.0, 0.1, 1, "host")
    complete(timeline, "rollout", 5.0, 8.0, 1, "generate")
    complete(timeline, "update", 8.0, 9.0, 1)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time/step_s": 6.0}) + "\n")
    run = RunReader(tmp_path)
    run.refresh()
    assert run.window(1) == (3.0, 9.0) and run.window(2) is None
    view = step_view(run, 1)
    assert view is not None and view["seconds"] == 6.0
    assert [bar[:5] for bar in view["spans"]] == [
        ["rollout", "generate", "rollout/0", 2.0, 3.0],
        ["update", "train", "update/0", 5.0, 1.0],
    ]
    assert view["idle"] == [
        ["generate", 0.0, 2.0, "driver"],
        ["generate", 5.0, 1.0, "update (update)"],
        ["train", 0.0, 2.0, "driver"],
        ["train", 2.0, 3.0, "rollout (rollout)"],
    ]
    assert view["path"] == []
    assert view["busy"]["train"] == pytest.approx(1 / 6, abs=1e-4)


def test_a_night_between_two_starts_is_a_pause(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    run = RunReader(folder)
    run.refresh()
    assert run.pauses() == []
    timeline = Timeline()
    timeline.start(folder, 4)
    end = run.spans[-1].end
    complete(timeline, "update", end + 30_000, end + 30_004, 5)
    run.refresh()
    ((step, seconds),) = run.pauses()
    assert step == 4 and seconds == pytest.approx(30_000, abs=10)


def test_the_critical_path_of_a_planned_pipeline_is_the_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    run = RunReader(folder)
    run.refresh()
    view = step_view(run, 3, run.plan)
    assert view is not None and sum(part[4] for part in view["path"]) == pytest.approx(run.steps[2]["time/step_s"])
    assert {part[0] for part in view["path"]} >= {"rollout", "update"}
    (folder / "pipeline.yaml").write_text("name: [\n")
    assert run.plan is None


def test_a_restart_is_one_event_though_metrics_and_timeline_tell_it(tmp_path: Path) -> None:
    """A loss is counted with the step that ends next; the step after it waits for the restart."""
    folder = write_run(tmp_path / "run")
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | {"run/restarts": float(line["step"] >= 2)}) + "\n" for line in lines))
    timeline = Timeline()
    timeline.start(folder, 4)
    timeline.extend([Activity("restart", "restart", 1e9, 1e9 + 1, 3, None, "rollout", WorkerId("generator", 0))])
    timeline.close()
    run = RunReader(folder)
    run.refresh()
    (event,) = overview(run)["events"]
    assert (event["step"], event["kind"]) == (3, "restart") and "generator restarted" in event["text"]


def test_alarms_are_events_of_the_page_and_lines_of_the_summary(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", 'run.warn_when=["reward/mean > 0.15 for 2"]'))
    (event,) = overview(run)["events"]
    assert (event["step"], event["kind"]) == (3, "alarm")
    assert event["text"] == "reward/mean is 0.3 (run.warn_when: reward/mean > 0.15 for 2)"
    assert f"  step 3: {event['text']}" in summary(run, {})
    assert summary_values(run)["alarms"] == [
        {"step": 3, "condition": "reward/mean > 0.15 for 2", "value": 0.3, "stops": False}
    ]


def test_an_overview_says_that_responses_were_cut_in_the_words_of_the_summary(tmp_path: Path, capsys) -> None:
    run = write_run(tmp_path / "one")
    assert overview(open_run(run))["notes"] == []
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    cut = [line | {"response_tokens/cut_fraction": 0.9, "val/response_tokens/cut_fraction": 1.0} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in cut))
    notes = overview(open_run(run))["notes"]
    assert len(notes) == 2
    assert main(["report", str(run)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert all(note in told for note in notes)
