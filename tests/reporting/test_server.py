"""The runs that `dagrl ui` serves."""

import datetime
import decimal
import math
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from dagrl.reporting.html_report import write_html
from dagrl.reporting.server import Runs, application


def test_runs_stay_when_others_are_removed(tmp_path):
    for name in ("a", "b", "many/c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    runs = Runs([tmp_path / "a", tmp_path / "many", tmp_path / "b"])
    assert [(run["id"], run["name"]) for run in runs.entries()] == [("0", "a"), ("1", "c"), ("2", "b")]
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "many")
    assert [run["id"] for run in runs.entries()] == ["0", "1", "2"]
    assert runs.ask("2", lambda run: len(run.steps)) == 1
    (tmp_path / "many" / "d").mkdir(parents=True)
    (tmp_path / "many" / "d" / "metrics.jsonl").write_text("")
    assert [run["name"] for run in runs.entries()] == ["a", "c", "b", "d"]


@pytest.fixture
def client(tmp_path):
    """The page of two runs: `bad`, which tests spoil, and `good`."""
    for name in ("bad", "good"):
        (tmp_path / name / "samples").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
        (tmp_path / name / "pipeline.yaml").write_text("name: [\n")
    return TestClient(application(Runs([tmp_path / "bad", tmp_path / "good"])), base_url="http://127.0.0.1")


@pytest.mark.parametrize("name", ["metrics.jsonl", "timeline.json", "pipeline.yaml", "samples/step_1.parquet"])
def test_a_pipe_or_a_link_in_a_run_is_refused_and_holds_up_no_other(client, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text('{"step": 1, "token": "hf_secret"}\n')
    path = tmp_path / "bad" / name
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to(secret), path.mkdir):
        path.unlink(missing_ok=True)
        make()
        for asked in ("overview", "metrics", "samples/train/1"):
            answer = client.get(f"/api/0/{asked}")
            assert "secret" not in answer.text.replace(str(secret), "")
        assert client.get("/api/1/metrics").status_code == 200


def test_the_best_checkpoint_and_the_failure_are_not_read_through_links(client, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hf_secret")
    for folder, name in (("logs", "failure.txt"), ("checkpoints", "best")):
        (tmp_path / "bad" / folder).mkdir()
        link = tmp_path / "bad" / folder / name
        link.symlink_to(secret)
        for get in (lambda: client.get("/api/0/overview").text, lambda: report_text(tmp_path)):
            assert "hf_secret" not in get()
        link.unlink()


def report_text(folder: Path) -> str:
    try:
        write_html([folder / "bad"], folder / "report.html")
    except ValueError as error:
        return str(error)
    return (folder / "report.html").read_text()


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 2, "run/restarts": 1e308}',
        '{"step": 2, "run/restarts": NaN}',
        '{"step": 2, "run/restarts": -Infinity, "time/step_s": Infinity}',
        '{"step": 2, "reward/mean": 1' + "0" * 400 + "}",
        '{"step": 1e308}',
        '{"step": -5, "time/step_s": -1e300}',
        '{"step": [], "a": {}}',
    ],
)
def test_extreme_numbers_of_metrics_are_shown(client, tmp_path, line):
    with (tmp_path / "bad" / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert [client.get(f"/api/0/{asked}").status_code for asked in ("overview", "metrics")] == [200, 200]


def test_samples_of_any_type_are_shown(client, tmp_path):
    row = {
        "step": 1,
        "bytes": b"\xff\x00",
        "date": datetime.date(2026, 1, 2),
        "decimal": decimal.Decimal("1.5"),
        "nested": {"list": [math.nan], "a": [{"b": b"x", "c": math.inf}]},
        "time": datetime.timedelta(seconds=3),
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "bad" / "samples" / "step_1.parquet")
    answer = client.get("/api/0/samples/train/1")
    assert answer.status_code == 200
    (shown,) = answer.json()
    assert shown["nested"] == {"list": [None], "a": [{"b": "x", "c": None}]}
    assert (shown["date"], shown["decimal"]) == ("2026-01-02", "1.5")


@pytest.mark.parametrize("first", ["abc", "-1", "1e9", "9" * 5000, "", "²"])
def test_a_first_step_that_is_no_number_shows_all(client, first):
    answer = client.get("/api/0/metrics", params={"first": first, "generation": "0"})
    assert answer.status_code == 200
