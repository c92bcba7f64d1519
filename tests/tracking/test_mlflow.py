"""MLflow with a database in the run folder: real runs, read back by its own client."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from dagrl.config.schema import TrackerSpec
from dagrl.tracking.background_tracker import BackgroundTracker
from dagrl.tracking.base import SampleTable
from dagrl.tracking.mlflow import Mlflow, metric_name

pytest.importorskip("mlflow")
CONFIG = {"name": "tiny", "nodes": {"rollout": {"n": 8, "stop": [1, 2]}}, "data": {"long": "x" * 600}}
TABLE = SampleTable(("prompt", "reward"), (("1+1=", 1.0),))


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests: to make MLflow's database takes seconds."""
    return tmp_path_factory.mktemp("run")


def client(run_dir: Path):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{run_dir / 'mlflow' / 'mlflow.db'}")


def run_id(run_dir: Path) -> str:
    return (run_dir / "mlflow" / "run_id").read_text().strip()


def track(run_dir: Path, steps: list[int], resumed_step: int | None, *, ok: bool = True) -> list[str]:
    notes: list[str] = []
    tracker = Mlflow("tiny", notes.append, TrackerSpec(tracker="mlflow"))
    tracker.start(run_dir, CONFIG, resumed_step)
    for step in steps:
        tracker.log(step, {"val/aime/mean@4": step / 10, "kl/ref": float("nan"), "grad_norm": float("inf")})
        tracker.samples(step, TABLE)
    tracker.close(ok)
    return notes


def test_a_run_has_metrics_parameters_the_pipeline_and_tables_and_continues_as_the_same(run_dir: Path) -> None:
    (note,) = track(run_dir, [1, 2], None)
    first = run_id(run_dir)
    assert note == (
        f"mlflow: run {first} in {run_dir / 'mlflow'}; look at it with: "
        f"mlflow ui --backend-store-uri sqlite:///{run_dir / 'mlflow' / 'mlflow.db'}"
    )
    run = client(run_dir).get_run(first)
    assert (run.info.run_name, run.info.status) == ("tiny", "FINISHED")
    assert run.data.params == {
        "name": "tiny",
        "nodes.rollout.n": "8",
        "nodes.rollout.stop": "[1, 2]",
        "data.long": "x" * 500,
    }
    track(run_dir, [2, 3], resumed_step=1, ok=False)
    assert run_id(run_dir) == first
    run = client(run_dir).get_run(first)
    assert run.info.status == "FAILED"
    history = client(run_dir).get_metric_history(first, "val/aime/mean_at_4")
    assert sorted((each.step, each.value) for each in history) == [(1, 0.1), (2, 0.2), (2, 0.2), (3, 0.3)]
    artifacts = run_dir / "mlflow" / "artifacts" / first / "artifacts"
    assert (artifacts / "pipeline.yaml").read_text().startswith("name: tiny\nnodes:\n  rollout:\n    n: 8\n")
    table = json.loads((artifacts / "samples" / "step_3_val.json").read_text())
    assert table == {"columns": ["prompt", "reward"], "data": [["1+1=", 1.0]]}
    shown = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert [each["path"] for each in shown] == [f"samples/step_{step}_val.json" for step in (1, 2, 3)]
    assert math.isnan(run.data.metrics["grad_norm"])


def test_a_run_from_the_start_is_another_one(run_dir: Path) -> None:
    track(run_dir, [], None)
    first = run_id(run_dir)
    track(run_dir, [], None)
    assert run_id(run_dir) != first


def test_a_run_that_the_server_has_lost_starts_again(run_dir: Path) -> None:
    track(run_dir, [1], None)
    (run_dir / "mlflow" / "run_id").write_text("0" * 32)
    track(run_dir, [2], resumed_step=1)
    assert client(run_dir).get_run(run_id(run_dir)).info.status == "FINISHED"


def test_a_deleted_run_starts_again(run_dir: Path) -> None:
    track(run_dir, [1], None)
    deleted = run_id(run_dir)
    client(run_dir).delete_run(deleted)
    track(run_dir, [2], resumed_step=1)
    assert run_id(run_dir) != deleted
    assert client(run_dir).get_run(run_id(run_dir)).info.status == "FINISHED"


def test_an_experiment_that_another_run_has_just_made_is_used(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    track(run_dir, [1], None)
    look, answers = MlflowClient.get_experiment_by_name, [None]
    monkeypatch.setattr(
        MlflowClient, "get_experiment_by_name", lambda self, name: answers.pop() if answers else look(self, name)
    )
    (note,) = track(run_dir, [1], None)
    assert note.startswith("mlflow: run ")


def test_a_server_that_is_not_there_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr("dagrl.tracking.mlflow.PATIENCE_S", 0.0)
    notes: list[str] = []
    tracker = BackgroundTracker("mlflow", Mlflow("tiny", notes.append, TrackerSpec(tracker="mlflow")), notes.append)
    tracker.start(tmp_path, CONFIG, None)
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close(ok=True)
    (note,) = notes
    assert note == (
        "mlflow stopped: 127.0.0.1:9 does not answer: Connection refused (MLFLOW_TRACKING_URI); "
        "metrics.jsonl has every step"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [("val/pass@4", "val/pass_at_4"), ("val/open-r1/mean@1", "val/open-r1/mean_at_1"), ("val/größe,", "val/gr__e_")],
)
def test_names_that_mlflow_would_refuse_are_written_otherwise(name: str, expected: str) -> None:
    assert metric_name(name) == expected


def test_the_experiment_of_the_file_comes_before_that_of_the_environment(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the machine")
    tracker = Mlflow("tiny", lambda note: None, TrackerSpec(tracker="mlflow", project="of the file"))
    tracker.start(run_dir, CONFIG, None)
    tracker.close(ok=True)
    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir / 'mlflow' / 'mlflow.db'}")
    assert (
        client.get_run(run_id(run_dir)).info.experiment_id == client.get_experiment_by_name("of the file").experiment_id
    )
