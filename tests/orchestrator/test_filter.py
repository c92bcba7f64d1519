"""Dynamic sampling in a real run: several rounds, with the same rows whether or not the run was taken up again."""

from __future__ import annotations

import json
import shutil

import pyarrow.parquet as pq
import pytest

NEEDED, STEPS = 8, 3


@pytest.fixture(scope="module")
def pipeline(lab):
    """Few groups of two differ in what they got, so that most steps take several rounds."""
    declared = lab.tiny_pipeline()
    del declared["nodes"]["old"], declared["nodes"]["update"]["mini_batch"]
    declared["nodes"]["rollout"]["n"] = 2
    declared["nodes"]["reward"]["fn"] = "rewards:even"
    declared["nodes"]["keep"] = {"op": "filter", "max_rounds": 20}
    declared["run"] = {"steps": STEPS, "seed": 3, "save_every": 1, "validate_every": 2, "keep": STEPS}
    return declared


@pytest.fixture(scope="module")
def unbroken(lab, pipeline, tmp_path_factory):
    folder = tmp_path_factory.mktemp("filter")
    run = lab.start(lab.write_pipeline(folder, pipeline), folder / "run")
    assert run.wait() == 0, run.output
    return run


def samples(run, step: int) -> list[dict]:
    return pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist()


def rewards_of_groups(rows: list[dict]) -> dict[int, set[float]]:
    groups: dict[int, set[float]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], set()).add(row["reward"])
    return groups


def test_a_step_consists_of_groups_that_pass(unbroken):
    for step in range(1, STEPS + 1):
        rows = samples(unbroken, step)
        assert len(rows) == 2 * NEEDED
        assert rewards_of_groups(rows) == {row["group_id"]: {0.0, 1.0} for row in rows}
        assert len(rewards_of_groups(rows)) == NEEDED


def test_rounds_are_reported_and_add_up(unbroken):
    metrics, positions = unbroken.metrics(), [0]
    for step, line in enumerate(metrics, start=1):
        state = json.loads((unbroken.folder / "checkpoints" / f"step_{step}" / "order.json").read_text())
        positions.append(state["passed"])
        begun = positions[-1] - positions[-2]
        passed = line["samples/trained"] + line["samples/unused"]
        assert begun * line["filter/kept_fraction"] == pytest.approx(passed / 2)
        assert (line["samples/generated"], line["samples/trained"]) == (2 * begun, 2 * NEEDED)
        assert max(row["group_id"] for row in samples(unbroken, step)) < begun
        assert line["reward/mean"] == 0.5
    assert max(line["filter/rounds"] for line in metrics) > 1
    assert "val/reward/mean" in metrics[1]


def test_nodes_after_the_filter_run_once(unbroken):
    events = json.loads((unbroken.folder / "timeline.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    rounds = {line["step"]: line["filter/rounds"] for line in unbroken.metrics()}
    for name, times in (("rollout", 1), ("keep", 1), ("ref", 0), ("update", 0)):
        for step, count in rounds.items():
            mine = [each for each in events if each["name"] == name and each.get("args", {}).get("step") == step]
            shards = {"rollout": 2, "ref": 2}.get(name, 1)
            assert len(mine) == shards * (count if times else 1), (name, step)


@pytest.mark.soak
def test_a_run_that_is_taken_up_again_trains_on_the_same_rows(lab, pipeline, unbroken, tmp_path):
    shutil.copytree(unbroken.folder, tmp_path / "run", symlinks=True)
    for step in range(2, STEPS + 1):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step}")
        (tmp_path / "run" / "samples" / f"step_{step}.parquet").unlink()
    again = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run")
    assert again.wait() == 0, again.output
    assert "going on after step 1" in again.output
    for step in range(2, STEPS + 1):
        assert samples(again, step) == samples(unbroken, step)
    assert lab.comparable(again.metrics()) == lab.comparable(unbroken.metrics())
