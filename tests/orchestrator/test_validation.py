"""A real run that validates on several sets with several responses to each prompt, and keeps its best checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dagrl.config.schema import KeepBestSpec
from dagrl.config.schema.val_metrics import names_at_k
from dagrl.orchestrator.folder.checkpoint import Checkpoints, Score

METRIC = "val/half/best@4"


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("validation")
    pipeline = lab.tiny_pipeline()
    greedy = {"path": "half.parquet", "n": 1, "sampling": {"max_new_tokens": 2, "temperature": 0.0}}
    pipeline["data"]["val"] = {"all": "train.parquet", "half": "half.parquet", "greedy": greedy}
    pipeline["nodes"]["rollout"] |= {"val_n": 4, "val_sampling": {"max_new_tokens": 3, "temperature": 1.0}}
    pipeline["nodes"]["reward"] = {"op": "reward", "fn": "rewards:even"}
    pipeline["data"]["val_vote"] = "exact"
    best = {"metric": METRIC, "mode": "min"}
    pipeline["run"] |= {"steps": 4, "save_every": 1, "keep": 1, "validate_every": 1, "keep_best": best}
    pipeline["run"]["validate_first"] = True
    pipeline["track"] = ["console", "tensorboard", "swanlab"]
    path = lab.write_pipeline(folder, pipeline)
    rows = pq.read_table(folder / "train.parquet")
    pq.write_table(rows.slice(0, 8), folder / "half.parquet")
    run = lab.start(path, folder / "run")
    assert run.wait() == 0, run.output
    return run


def test_each_set_has_its_metrics_in_each_validation(run) -> None:
    lines = run.metrics()
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    for line in lines:
        for name in names_at_k(4, votes=True):
            assert f"val/all/{name}" in line
            assert f"val/half/{name}" in line
        for name in ("all", "half"):
            assert line[f"val/{name}/mean@4"] == pytest.approx(line[f"val/{name}/pass@1"])
            assert line[f"val/{name}/worst@4"] <= line[f"val/{name}/mean@4"] <= line[f"val/{name}/best@4"]
        assert line["val/greedy/response_tokens/max"] <= 2
        assert not any(name.startswith("val/greedy/") and name.endswith("@4") for name in line)
        # 16 prompts and 8 with four responses each, and 8 with one.
        sums = 64 * line["val/all/mean@4"] + 32 * line["val/half/mean@4"] + 8 * line["val/greedy/mean@1"]
        mean = sums / 104
        assert line["val/reward/mean"] == pytest.approx(mean, abs=1e-6)


def test_samples_of_both_sets_are_written_and_differ_within_a_group(run) -> None:
    rows = pq.read_table(run.folder / "samples" / "step_2_val.parquet").to_pylist()
    assert [row["data_set"] for row in rows] == ["all"] * 64 + ["half"] * 32 + ["greedy"] * 8
    groups = [[row["response"] for row in rows[first : first + 4]] for first in range(0, 96, 4)]
    assert all(len({row["group_id"] for row in rows[first : first + 4]}) == 1 for first in range(0, 96, 4))
    assert any(len(set(group)) > 1 for group in groups)
    assert [row["group_id"] for row in rows[::4][:24]] + [row["group_id"] for row in rows[96:]] == [*range(32)]


def test_the_best_checkpoint_is_kept_beside_the_newest(run) -> None:
    values = {line["step"]: line[METRIC] for line in run.metrics() if line["step"] > 0}
    best = min(values, key=values.__getitem__)
    checkpoints = Checkpoints(run.folder, keep=1, keep_best=KeepBestSpec(metric=METRIC, mode="min"))
    assert checkpoints.steps() == sorted({best, 4})
    assert checkpoints.best() == checkpoints.of_step(best)
    assert (run.folder / "checkpoints" / "best").read_text() == f"step_{best}\n"
    assert checkpoints.read(checkpoints.of_step(4)).score == Score(METRIC, values[4])


def test_trackers_show_the_samples(run) -> None:
    tables: list[Path] = list(run.folder.glob("swanlab/run-*/media/**/*.json"))
    assert len(tables) == 5
    assert "swanlab: offline; upload with: swanlab sync" in run.output


def test_a_validation_alone_of_a_checkpoint_measures_what_its_run_did(run, lab) -> None:
    def left() -> dict[str, bytes]:
        files = ["metrics.jsonl", "timeline.json", "pipeline.yaml", "checkpoints/best"]
        return {name: (run.folder / name).read_bytes() for name in files}

    before, samples = left(), pq.read_table(run.folder / "samples" / "step_4_val.parquet")
    again = lab.start(run.folder.parent / "pipeline.yaml", run.folder, "run.val_only=true")
    assert again.wait() == 0, again.output
    assert left() == before
    assert pq.read_table(run.folder / "samples" / "step_4_val.parquet") == samples
    assert "step 4/4 validation  reward" in again.output
    assert "validated the checkpoint of step 4 in" in again.output


def test_an_evaluation_of_a_checkpoint_measures_what_its_run_did_and_compares_a_model_with_it(
    run, lab, tmp_path
) -> None:
    here, model = run.folder.parent, tmp_path / "first-hf"
    assert lab.call("export", run.folder, "-o", model).returncode == 0
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}
    for wrong, why in (
        (["first-hf"], "first-hf is a model alone; name its prompts with --data FILE"),
        ([run.folder, "--steps", "4,9"], "holds no checkpoint 9; its steps are"),
        ([run.folder, run.folder], "two targets have the same name; name each once"),
    ):
        ended = lab.call("eval", *wrong, at=tmp_path)
        assert ended.returncode == 2 and why in ended.stderr and ended.stderr.startswith("dagrl eval: ")
    keys = ["nodes.rollout.sampling.max_new_tokens=3", "nodes.reward.fn=rewards:even", "data.max_prompt_tokens=8"]
    options = ["--data", "train.parquet", "--n", 4, "--run-dir", tmp_path / "evals", "--out", tmp_path / "out.json"]
    ended = lab.call("eval", run.folder, model, *options, "-q", *keys, at=here)
    assert ended.returncode == 0, ended.stderr
    assert before == {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}, "the run is as it was"
    found = json.loads((tmp_path / "out.json").read_text())
    line = run.metrics()[-1]
    of_run, of_model = found["results"]
    assert of_run["metrics"]["val/mean@4"] == line["val/all/mean@4"]
    [own] = of_run["sets"]
    assert (own["prompts"], own["n"], own["lost"]) == (16, 4, 0) and sum(own["finish_reasons"].values()) == 64
    assert own["figures"].keys() == {"mean@4", "pass@1", "pass@2", "pass@4"}
    for name, figure in own["figures"].items():
        assert figure["value"] == pytest.approx(line[f"val/all/{name}"], abs=1e-6)
        assert figure["low"] <= figure["value"] <= figure["high"]
    [comparison] = found["comparisons"]
    [paired] = comparison["sets"]
    means = [of["sets"][0]["figures"]["mean@4"]["value"] for of in (of_run, of_model)]
    assert paired["figures"]["mean@4"]["value"] == pytest.approx(means[1] - means[0], abs=1e-6)
    scores = {row["sample_id"]: row["mean"] for row in of_run["prompts"]}
    for row in of_model["prompts"]:
        change = row["mean"] - scores[row["sample_id"]]
        listed = [each["sample_id"] for each in paired["better" if change > 0 else "worse"]]
        assert (row["sample_id"] in listed) == bool(change)
    assert "first-hf minus run-step_4, on the same prompts" in ended.stdout
    assert '"evaluation": true' in (tmp_path / "out.html").read_text()
