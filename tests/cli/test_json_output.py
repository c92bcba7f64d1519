"""`--json` prints one JSON value on stdout, with what the text says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dagrl.cli import main
from dagrl.cli.parameters import print_json
from dagrl.doctor.findings import hint, missing, ok


@pytest.fixture
def called(capsys):
    def call(*arguments: object) -> tuple[int, object]:
        code = main([str(each) for each in arguments])
        told = capsys.readouterr()
        assert told.err == ""
        return code, json.loads(told.out)

    return call


def test_a_valid_pipeline(pipeline: Path, called) -> None:
    code, found = called("validate", pipeline, "--json")
    assert code == 0
    assert found["valid"] is True and found["problems"] == []
    assert found["pipeline"] == "tiny" and found["steps"] == 10
    assert found["data"] == {"train": {"path": str(pipeline.with_name("train.parquet")), "prompts": 16}}
    assert found["engines"]["generator"] == {"backend": "hf", "group": "all"}
    assert found["nodes"]["reward"] == {"op": "reward", "executor": "host"}


def test_warnings_of_a_valid_pipeline(pipeline: Path, called) -> None:
    spare = "spare: {op: reward, fn: exact, write: baseline_reward}"
    pipeline.write_text(pipeline.read_text().replace("fn: exact}", f"fn: exact}}\n  {spare}"))
    code, found = called("validate", pipeline, "--json")
    assert code == 0 and found["valid"] is True
    assert [warning["place"] for warning in found["warnings"]] == ["nodes.spare"]


def test_a_wrong_pipeline_has_its_problems_by_line(pipeline: Path, called) -> None:
    pipeline.write_text(pipeline.read_text().replace("steps: 10", "step: 10"))
    code, found = called("validate", pipeline, "--json")
    assert code == 2 and found["valid"] is False
    (problem,) = found["problems"]
    assert (problem["file"], problem["line"], problem["code"]) == (str(pipeline), 13, "unknown-key")
    assert problem["place"] == "run.step" and "steps" in problem["message"]


def test_a_graph(pipeline: Path, called) -> None:
    code, found = called("graph", pipeline, "--json")
    assert code == 0
    assert {"from": "reward", "to": "advantage", "columns": ["reward"]} in found["edges"]
    by_name = {node["name"]: node for node in found["nodes"]}
    assert by_name["update"] == {"name": "update", "op": "update", "executor": "actor", "stage": 4, "skipped": None}


def test_a_graph_is_drawn_beside_its_json(pipeline: Path, called) -> None:
    drawing = pipeline.with_name("dag.mmd")
    code, _ = called("graph", pipeline, "--json", "-o", drawing)
    assert code == 0 and drawing.read_text()


def test_findings_of_the_doctor(called, monkeypatch) -> None:
    def examine():
        yield "machine", iter([ok("processor", "4 cores"), hint("GPUs", "none")])
        yield "software", iter([missing("torch", "gone")])

    monkeypatch.setattr("dagrl.doctor.examination.examine", examine)
    code, found = called("doctor", "--json")
    assert code == 1 and (found["missing"], found["hints"]) == (1, 1)
    assert found["findings"][2] == {"verdict": "missing", "section": "software", "name": "torch", "text": "gone"}


def test_a_run(tmp_path: Path, called) -> None:
    steps = [{"step": 0, "val/reward/mean": 0.1}]
    steps += [
        {"step": n, "reward/mean": n / 10, "time/step_s": 2.0, "time/update": 1.0, "run/restarts": 1} for n in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    code, found = called("report", tmp_path, "--json")
    assert code == 0
    assert (found["step"], found["restarts"], found["torn_lines"]) == (2, 1, 0)
    assert found["metrics"]["reward/mean"] == {"first": 0.1, "last": 0.2, "best": 0.2}
    assert found["seconds"]["update"] == {"mean": 1.0, "median": 1.0, "max": 1.0}


def test_exported_weights(tmp_path: Path, called, monkeypatch) -> None:
    monkeypatch.setattr("dagrl.orchestrator.export.export_run", lambda *arguments, **options: "actor after step 2")
    code, found = called("export", tmp_path, "-o", tmp_path / "hf", "--json")
    assert code == 0 and found == {"output": str(tmp_path / "hf"), "summary": "actor after step 2"}


def test_json_and_html_exclude_each_other(tmp_path: Path, capsys) -> None:
    assert main(["report", str(tmp_path), "--json", "--html"]) == 2
    assert "--json has the summary; remove --html and --timeline" in capsys.readouterr().err


def test_values_without_a_json_form_are_null(capsys) -> None:
    print_json({"a": [float("nan"), float("inf"), 1.5], "b": (None, True)})
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.5], "b": [None, True]}
