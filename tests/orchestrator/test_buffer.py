"""A replay buffer in a real run: rounds of a filter, steps that overlap, two CPU workers; resumed."""

from __future__ import annotations

import shutil
from typing import Any

import pyarrow.parquet as pq
import pytest

STEPS, RETURNED = 6, 3


def pipeline_of(lab) -> dict[str, Any]:
    declared = lab.tiny_pipeline()
    declared["nodes"]["reward"]["fn"] = "rewards:even"
    declared["nodes"]["keep"] = {"op": "filter", "max_rounds": 20}
    declared["nodes"]["replay"] = {"op": "buffer", "groups_per_step": RETURNED, "policy": "prioritised", "max_age": 3}
    declared["nodes"]["replay"] |= {"capacity": 60, "max_uses": 2}
    declared["nodes"]["update"]["rollout_correction"] = {"rollout_is": "token"}
    declared["run"] |= {"steps": STEPS, "host_workers": 2, "keep": 2, "samples_per_step": 1000, "validate_every": None}
    del declared["data"]["val"]
    return declared


@pytest.fixture(scope="module")
def unbroken(lab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("buffer")
    run = lab.start(lab.write_pipeline(folder, pipeline_of(lab)), folder / "run")
    assert run.wait() == 0, run.output
    return run


@pytest.fixture(scope="module")
def overlapping(lab, tmp_path_factory):
    """The weights that sample a step depend on the time of other steps, so no two runs are equal."""
    folder = tmp_path_factory.mktemp("overlapping")
    run = lab.start(lab.write_pipeline(folder, pipeline_of(lab)), folder / "run", "schedule.max_staleness=1")
    assert run.wait() == 0, run.output
    return run


def samples(run, step: int) -> list[dict]:
    return pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist()


@pytest.mark.parametrize("name", ["unbroken", pytest.param("overlapping", marks=pytest.mark.slow)])
def test_a_step_trains_on_its_own_groups_and_on_those_that_return(request, name) -> None:
    run = request.getfixturevalue(name)
    seen: dict[tuple, int] = {}
    for line in run.metrics():
        rows = samples(run, line["step"])
        own = [row for row in rows if not row["is_replayed"]]
        returned = [row for row in rows if row["is_replayed"]]
        assert len(own) == 8 * 4
        assert len(returned) == 4 * line["buffer/returned"]
        assert line["reward/mean"] == pytest.approx(sum(row["reward"] for row in own) / len(own))
        for row in returned:
            key = (row["prompt"], row["response"], row["reward"], row["policy_version"])
            assert key in seen, "a sample that no earlier step had"
            assert line["step"] - 1 - row["policy_version"] <= 3
        for row in own:
            seen[row["prompt"], row["response"], row["reward"], row["policy_version"]] = line["step"]
        assert line["staleness/masked"] == 0
        assert line["samples/trained"] >= len(own)
    returned = [line["buffer/returned"] for line in run.metrics()]
    assert returned == [0, *[RETURNED] * (STEPS - 1)]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_groups(lab, unbroken, tmp_path) -> None:
    path = lab.write_pipeline(tmp_path, pipeline_of(lab))
    shutil.copytree(unbroken.folder, tmp_path / "run", symlinks=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{STEPS}")
    for step in (STEPS - 1, STEPS):
        (tmp_path / "run" / "samples" / f"step_{step}.parquet").unlink()
    # As a kill leaves them: later files of the buffer than the checkpoint's are there, or are half written.
    (tmp_path / "run" / "buffer" / "replay" / f".step_{STEPS - 1}.parquet").write_bytes(b"half of it")
    finished = lab.start(path, tmp_path / "run")
    assert finished.wait() == 0, finished.output
    assert f"going on after step {STEPS - 2}" in finished.output
    assert lab.comparable(finished.metrics()) == lab.comparable(unbroken.metrics())
    for step in range(1, STEPS + 1):
        assert samples(finished, step) == samples(unbroken, step)
    index = [pq.read_table(run.folder / "buffer/replay/index_6.parquet").to_pylist() for run in (finished, unbroken)]
    assert index[0] == index[1]
