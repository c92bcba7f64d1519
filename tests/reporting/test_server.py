"""The runs that `dagrl ui` serves."""

import shutil

from dagrl.reporting.server import Runs


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
