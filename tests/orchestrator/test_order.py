"""Orders of prompts, and what follows them, in real runs: two sources, pass rates, and a run that is resumed."""

from __future__ import annotations

import shutil
from typing import Any

import pyarrow.parquet as pq
import pytest

STEPS, KEPT = 32, 16


def sampling_only(lab: Any, order: Any) -> dict[str, Any]:
    """Two sources, 3:1, whose steps overlap; nothing is trained."""
    pipeline = lab.tiny_pipeline()
    pipeline["engines"] = {"generator": {"backend": "hf", "group": "rollout"}}
    del pipeline["groups"]["train"]
    pipeline["nodes"] = {name: pipeline["nodes"][name] for name in ("rollout", "reward")}
    pipeline["nodes"]["rollout"]["n"] = 2
    pipeline["nodes"]["reward"]["fn"] = "rewards:even"
    pipeline["nodes"]["advantage"] = {"op": "advantage", "estimator": "rae"}
    train = {"many": {"path": "train.parquet", "weight": 3}, "few": {"path": "train.parquet", "weight": 1}}
    pipeline["data"] |= {"train": train, "val": None, "prompts_per_step": 4, "order": order}
    pipeline["schedule"]["max_staleness"] = 1
    pipeline["run"] |= {"steps": STEPS, "validate_every": None, "save_every": KEPT, "keep": "all"}
    return pipeline


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("order")
    order = {"adaptive": {"band": [0.3, 0.7], "skip_solved_for": 3}}
    run = lab.start(lab.write_pipeline(folder, sampling_only(lab, order)), folder / "run")
    assert run.wait() == 0, run.output
    return run


def prompts(run: Any, step: int) -> list[tuple[str, str]]:
    rows = pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist()
    return [(row["data_set"], row["prompt"]) for row in rows]


def baselines(run: Any) -> list[dict[str, float]]:
    """Source -> baseline after each step."""
    prefix = "baseline/"
    return [
        {name.removeprefix(prefix): value for name, value in line.items() if name.startswith(prefix)}
        for line in run.metrics()
    ]


def test_each_step_has_the_shares_of_its_sources(run) -> None:
    for step, line in enumerate(run.metrics(), start=1):
        assert [name for name, _ in prompts(run, step)].count("many") == 2 * 3
        assert (line["data/many/prompts"], line["data/few/prompts"]) == (0.75, 0.25)
    assert line["epoch/many"] == pytest.approx(3 * STEPS / 16)
    assert line["epoch/few"] == pytest.approx(STEPS / 16)
    assert line["epoch"] == pytest.approx(4 * STEPS / 32)


def test_a_resumed_run_takes_the_prompts_of_an_uninterrupted_one(lab, run, tmp_path) -> None:
    shutil.copytree(run.folder, tmp_path / "run", symlinks=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{STEPS}")
    for step in range(KEPT + 1, STEPS + 1):
        (tmp_path / "run" / "samples" / f"step_{step}.parquet").unlink()
    shutil.copy(run.folder.parent / "train.parquet", tmp_path)
    shutil.copy(run.folder.parent / "rewards.py", tmp_path)
    again = lab.start(shutil.copy(run.folder.parent / "pipeline.yaml", tmp_path), tmp_path / "run")
    assert again.wait() == 0, again.output
    assert f"going on after step {KEPT}" in again.output
    for step in range(KEPT + 1, STEPS + 1):
        assert prompts(again, step) == prompts(run, step)
    # Nothing is trained, so that the responses are the same too: the baselines continue.
    assert baselines(again) == baselines(run)


def test_baselines_of_sources_go_from_response_to_response_over_steps(run) -> None:
    """Steps overlap; each begins with the baselines of the step before, in the order of responses."""
    expected: dict[str, float] = {}
    for step, found in enumerate(baselines(run), start=1):
        rows = pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist()
        for row in sorted(rows, key=lambda row: row["sample_id"]):
            before = expected.get(row["data_set"], 0.0)
            assert row["advantage"] == pytest.approx(row["reward"] - before, abs=1e-6)
            expected[row["data_set"]] = 0.95 * before + (1 - 0.95) * row["reward"]
        assert found == expected


def test_a_stage_ends_when_its_metric_is_reached_in_a_step_that_is_known(lab, tmp_path) -> None:
    stages = [{"weights": {"few": 1}, "until_metric": {"reward/mean": 0.0}}, {"weights": {"few": 1, "many": 1}}]
    pipeline = sampling_only(lab, {"stages": stages})
    pipeline["data"]["weights_by"] = "tokens"
    run = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run", "run.steps=4")
    assert run.wait() == 0, run.output
    # Step 1 has reached it, and with a staleness of 1 step 3 is the first that knows.
    assert [line["data/many/prompts"] > 0 for line in run.metrics()] == [False, False, True, True]
