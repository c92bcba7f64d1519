"""`dagrl report`, and the trace of `dagrl plan --simulate`: what was planned beside what was."""

import json
from pathlib import Path

import pytest
from finished_runs import write_run

from dagrl.cli import main
from dagrl.config.errors import PipelineError
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import OpContract
from dagrl.graph.inference import build_graph
from dagrl.orchestrator.folder.run_folder import contracts_text
from dagrl.reporting.run_data.overview import overview
from dagrl.reporting.run_data.run_reader import open_run
from dagrl.reporting.run_report import report_run
from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import WorkerId
from dagrl.tracking.timeline import Timeline

STEPS = 4


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that took just the seconds of a table."""
    return write_run(tmp_path / "run")


def test_the_pause_between_two_runs_of_a_folder_is_not_idle_time(tmp_path):
    """Two steps of 4 s, in which `train` has 1 s to do, then a night, then a third one; the folder knows no more."""
    folder = tmp_path / "run"
    folder.mkdir()
    timeline = Timeline()
    timeline.start(folder, None)
    # The validation before the first step is none of them.
    rollout = WorkerId("rollout", 0)
    timeline.extend([Activity("val/rollout", "rollout", 1e9 - 90, 1e9 - 10, 0, None, "rollout", rollout)])
    for step, begin in ((1, 0.0), (2, 4.0), (3, 30_000.0)):
        for name, group, start, end in (("rollout", "rollout", 0.5, 3.0), ("update", "train", 3.0, 4.0)):
            times = 1e9 + begin + start, 1e9 + begin + end
            timeline.extend([Activity(name, name, *times, step, None, group, WorkerId(name, 0))])
    timeline.close()
    lines = [{"step": step, "time/step_s": 4.0, "reward/mean": 0.5} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = report_run(folder)
    assert row(text, "train")[1] == "75%"
    # The half second before each rollout is the driver's, and in the step.
    assert row(text, "rollout")[1] == "38%"


def row(text: str, *name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[: len(name)] == [*name])


def complete_events(path: Path) -> list[dict]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_a_run_as_it_was_planned_is_the_same_by_node_and_group(run):
    text = report_run(run, timeline=True)
    assert "planned by the times of the first half of its own steps (no cost model: it does not cover" in text
    assert row(text, "rollout", "generator") == ["rollout", "generator", "6.000", "6.000", "1.00"]
    assert row(text, "update", "actor") == ["update", "actor", "4.000", "4.000", "1.00"]
    assert row(text, "a", "step")[-1] == "1.00"
    idle = text[text.index("  idle ") :]
    assert row(idle, "train")[1] == row(idle, "train")[2] != "0%"


def test_the_trace_has_both_side_by_side_from_one_beginning(run):
    report_run(run, timeline=True)
    events = complete_events(run / "timeline_planned.json")
    updates = {
        which: [
            event["ts"]
            for event in events
            if event["name"] == "update" and event["args"]["group"] == f"train ({which})"
        ]
        for which in ("planned", "actual")
    }
    assert len(updates["planned"]) == STEPS and updates["planned"] == updates["actual"]


def test_nothing_in_a_row_of_a_trace_overlaps(run, tmp_path):
    assert (
        main(["plan", str(run / "pipeline.yaml"), "run.host_workers=3", "--simulate", str(tmp_path / "plan.json")]) == 0
    )
    report_run(run, timeline=True)
    for path in (tmp_path / "plan.json", run / "timeline_planned.json"):
        rows: dict[int, int] = {}
        for event in sorted(complete_events(path), key=lambda event: (event["ts"], event["ts"] + event["dur"])):
            # A microsecond for rounding.
            assert event["ts"] >= rows.get(event["tid"], 0) - 1
            rows[event["tid"]] = event["ts"] + event["dur"]


def test_on_gpus_that_are_named_the_cost_model_plans(tmp_path):
    groups = "groups={train: {gpus_per_node: 1, gpu: H200}, rollout: {gpus_per_node: 1}}"
    folder = write_run(tmp_path / "run", groups)
    assert "no cost model: group rollout names no GPU" in report_run(folder, timeline=True)
    assert "planned by the cost model of `dagrl plan`" in report_run(folder, timeline=True, gpu="H200")
    with pytest.raises(ValueError, match="no GPU is known as 'H999'"):
        report_run(folder, timeline=True, gpu="H999")


@pytest.mark.parametrize("mean", [0.0, None, 0.25, 1e6], ids=str)
def test_responses_of_no_length_that_can_be_planned_are_assumed_instead(tmp_path, mean):
    """All of them are empty, or longer than what is sampled by the answers between turns."""
    groups = "groups={train: {gpus_per_node: 1, gpu: H200}, rollout: {gpus_per_node: 1}}"
    folder = write_run(tmp_path / "run", groups, "nodes.rollout.sampling.max_new_tokens=8")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = [json.dumps(line | {"response_tokens/mean": mean, "response_tokens/max": mean}) for line in lines]
    (folder / "metrics.jsonl").write_text("\n".join([*told, ""]))
    assert "planned by the cost model of `dagrl plan`" in report_run(folder, timeline=True, gpu="H200")


def test_without_timeline_nothing_is_planned_or_written(run, capsys):
    assert main(["report", str(run)]) == 0
    assert "planned" not in capsys.readouterr().out
    assert not (run / "timeline_planned.json").exists()


def test_the_tables_are_printed_if_the_trace_cannot_be_written(run, tmp_path):
    (run / "timeline_planned.json.new").mkdir()
    told = report_run(run, timeline=True)
    assert "planned / actual" in told
    assert f"no trace: cannot write {run / 'timeline_planned.json'}: Is a directory" in told


def test_reading_a_run_imports_none_of_its_modules(run, tmp_path, monkeypatch):
    """Neither from its folder, nor from the one that it names, nor from Python's path."""
    seen = tmp_path / "imported"
    code = tmp_path / "code"
    code.mkdir()
    for folder in (run, code):
        (folder / "weighing.py").write_text(
            f"import pathlib\npathlib.Path({str(seen)!r}).touch()\nimport dagrl\n"
            "@dagrl.node(reads=['response_tokens'], writes=['token_weight'])\ndef weigh(batch):\n    return {}\n"
        )
    (run / ".modules").write_text(f"{code}\n")
    monkeypatch.syspath_prepend(code)
    text = (run / "pipeline.yaml").read_text()
    (run / "pipeline.yaml").write_text(text.replace("nodes:\n", "nodes:\n  weigh:\n    op: weighing:weigh\n"))
    loaded = load_pipeline(run / "pipeline.yaml")
    for recorded in (None, "{", '{"weigh": {"reads": 3}}', "[" * 100_000):
        if recorded is not None:
            (run / ".contracts.json").write_text(recorded)
        with pytest.raises(PipelineError, match="`weighing:weigh` are unknown"):
            report_run(run, timeline=True)
        assert "error" in overview(open_run(run))["dag"]
    contract = OpContract(("response_tokens",), ("token_weight",))
    graph = build_graph(loaded.pipeline, recorded={"weigh": contract})
    (run / ".contracts.json").write_text(contracts_text(graph))
    assert "weigh" in report_run(run, timeline=True)
    assert not seen.exists()


def test_a_pipeline_that_this_dagrl_cannot_read_hides_no_metrics(run):
    (run / "pipeline.yaml").write_text("name: [\n")
    assert "step_s" in report_run(run)
    with pytest.raises(PipelineError):
        report_run(run, timeline=True)


def test_incomparable_runs_are_one_sentence(run, tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("dagrl report: ")
    (run / "timeline.json").unlink()
    with pytest.raises(ValueError, match="no finished step with a timeline yet"):
        report_run(run, timeline=True)
    (run / "pipeline.yaml").unlink()
    with pytest.raises(ValueError, match=r"holds no pipeline\.yaml"):
        report_run(run, timeline=True)
    assert report_run(run)
